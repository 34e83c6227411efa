// A worker that charges orders: Node and pg.
//
//     DATABASE_URL=postgresql://... node producer.mjs
//
// The order, the task's end and the effect commit together, or not at all. Ends with SIGTERM, between two tasks.

import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";

const owner = `${hostname()}-${process.pid}`; // names this worker among all others
const lease = 30, beat = 10; // seconds; a heartbeat about every third of the lease
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
pool.on("error", (error) => console.log(`an idle connection ended: ${error.message}`));
const stop = new AbortController();
process.on("SIGTERM", () => stop.abort());

/** Extends the lease while the work is under way, on a connection of its own. */
function keep(id, epoch) {
  const extend = "select fencepost.heartbeat($1, $2, $3, make_interval(secs => $4))";
  // The completion will be refused if the lease is lost.
  const failed = (error) => console.log(`${id}: no heartbeat: ${error.message}`);
  return setInterval(() => pool.query(extend, [id, epoch, owner, lease]).catch(failed), beat * 1000);
}

/** The rows first, `complete_task` last, in one transaction. An error must leave the outermost transaction. */
async function work(id, epoch, { order }) {
  const db = await pool.connect();
  let broken = true;
  try {
    await db.query("begin");
    const paid = await db.query("update orders set status = 'paid' where id = $1 returning total", [order]);
    if (paid.rowCount === 0) throw new RangeError(`there is no order ${order}`);
    const body = { order, total: paid.rows[0].total };
    const effects = JSON.stringify([{ topic: "order.paid", type: "order.paid", payload: body }]);
    await db.query("select fencepost.complete_task($1, $2, $3, $4)", [id, epoch, owner, effects]);
    await db.query("commit");
    broken = false;
  } finally {
    db.release(broken); // a connection whose transaction did not end well is not used again: that rolls it back
  }
}

/** Claims one task and ends its epoch. False: there was none. */
async function turn() {
  const claim = `select task_id as id, lease_epoch as epoch, payload
                 from fencepost.claim_tasks($1, kinds => '{charge}', lease => make_interval(secs => $2))`;
  const [task] = (await pool.query(claim, [owner, lease])).rows;
  if (!task) return false;
  const { id, epoch, payload } = task;
  const heart = keep(id, epoch);
  try {
    await work(id, epoch, payload);
    console.log(`${id}: completed under epoch ${epoch}`);
  } catch (error) {
    if (error instanceof RangeError) { // try again in a minute
      await pool.query("select fencepost.fail_task($1, $2, $3, $4, '1 minute')", [id, epoch, owner, error.message]);
      console.log(`${id}: ${error.message}`);
    } else if (error.code === "OB001") { // nothing of ours has stayed: say it
      await pool.query("select fencepost.worker_failed($1, lease_lost => true)", [owner]);
      console.log(`${id}: somebody else has it now`);
    } else {
      throw error; // the lease expires, and the task is claimed again
    }
  } finally {
    clearInterval(heart);
  }
  return true;
}

while (!stop.signal.aborted) {
  if (!(await turn())) await sleep(1000, undefined, { signal: stop.signal }).catch(() => {});
}
await pool.end();
