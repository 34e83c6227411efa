// An HTTP consumer that makes each effect once: Node's http and pg.
//
//     DATABASE_URL=postgresql://... [WEBHOOK_SECRET=whsec_...] [PORT=8080] node consumer.mjs
//
// The inbox (src/inbox/schema.sql) decides inside the transaction that makes the effect: the key first, the epoch second.

import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import pg from "pg";

const secret = Buffer.from((process.env.WEBHOOK_SECRET ?? "").replace(/^whsec_/, ""), "base64");
const scope = "billing"; // our name for the fencepost database that sends to us
const statuses = { applied: 200, duplicate: 200, stale: 412, conflict: 422, "in-progress": 409 };
const inbox = readFileSync(new URL("../../src/inbox/schema.sql", import.meta.url), "utf8").replaceAll("{schema}", "inbox");

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
pool.on("error", (error) => console.log(`an idle connection ended: ${error.message}`));

/** The verdict, and the effect if it is ours to make, in one transaction. */
async function apply(key, body) {
  const db = await pool.connect();
  let broken = true;
  try {
    await db.query("begin");
    const digest = createHash("sha256").update(body).digest();
    const decided = await db.query("select verdict, current from inbox.apply($1, $2, $3)", [scope, key, digest]);
    const { verdict, current } = decided.rows[0];
    if (verdict === "applied") {
      await db.query("insert into payments (key, body) values ($1, $2)", [key, body]);
    }
    await db.query("commit");
    broken = false;
    return { verdict, current };
  } finally {
    db.release(broken); // a connection whose transaction did not end well is not used again: that rolls it back
  }
}

/** Standard Webhooks 1.0: one of the signatures is ours, and the time is within five minutes of now. */
function signed(headers, body) {
  const sent = Number(headers["webhook-timestamp"]);
  if (!(Math.abs(Date.now() / 1000 - sent) <= 300)) return false;
  const mac = createHmac("sha256", secret).update(`${headers["webhook-id"]}.${sent}.`).update(body);
  const expected = Buffer.from(`v1,${mac.digest("base64")}`);
  const ours = (text) => text.length === expected.length && timingSafeEqual(Buffer.from(text), expected);
  return (headers["webhook-signature"] ?? "").split(" ").some(ours);
}

async function answer(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const body = Buffer.concat(chunks);
  const key = request.headers["webhook-id"];
  if (!key) return [400];
  if (secret.length && !signed(request.headers, body)) return [401];
  try {
    const { verdict, current } = await apply(key, body);
    const suffix = verdict === "stale" ? `; current=${current}` : "";
    return [statuses[verdict], { "Outbox-Ack": `${verdict}; key="${key}"${suffix}` }];
  } catch (error) {
    // Whether it committed is unknown: the relay comes again with the same key.
    console.log(`${key}: ${error.message}`);
    return [503];
  }
}

await pool.query(inbox);
await pool.query("create table if not exists payments (key text not null, body bytea not null)");
const server = createServer((request, response) => {
  const gone = () => response.destroy();
  answer(request).then(([status, headers]) => response.writeHead(status, headers).end(), gone);
});
server.listen(Number(process.env.PORT ?? 8080), "127.0.0.1", () => {
  console.log(`listening on 127.0.0.1:${server.address().port}`);
});
