"""A worker that charges orders: Python and psycopg 3.

    DATABASE_URL=postgresql://... python3 producer.py

The order, the task's end and the effect commit together, or not at all. Ends with SIGTERM, between two tasks.
"""

import os
import signal
import socket
import threading

import psycopg
from psycopg.types.json import Jsonb

DATABASE = os.environ["DATABASE_URL"]
OWNER = f"{socket.gethostname()}-{os.getpid()}"  # names this worker among all others
LEASE, BEAT = 30, 10  # seconds; a heartbeat about every third of the lease
stop = threading.Event()


def beat(task_id, epoch, done):
    """Extends the lease while the work is under way, on a connection of its own."""
    try:
        with psycopg.connect(DATABASE, autocommit=True) as db:
            while not done.wait(BEAT):
                extend = "select fencepost.heartbeat(%s, %s, %s, make_interval(secs => %s))"
                db.execute(extend, (task_id, epoch, OWNER, LEASE))
    except psycopg.Error as error:  # the completion will be refused if the lease is lost
        print(f"{task_id}: no heartbeat: {error}", flush=True)


def work(db, task_id, epoch, payload):
    """The rows first, `complete_task` last, in one transaction. An error must leave the outermost transaction."""
    with db.transaction():
        paid = "update orders set status = 'paid' where id = %s returning total"
        (total,) = db.execute(paid, [payload["order"]]).fetchone() or (None,)
        if total is None:
            raise LookupError(f"there is no order {payload['order']}")
        body = {"order": payload["order"], "total": str(total)}
        effects = [{"topic": "order.paid", "type": "order.paid", "payload": body}]
        db.execute("select fencepost.complete_task(%s, %s, %s, %s)", (task_id, epoch, OWNER, Jsonb(effects)))


def turn(db):
    """Claims one task and ends its epoch. False: there was none."""
    claim = "select task_id, lease_epoch, payload from fencepost.claim_tasks(%s, kinds => '{charge}', lease => make_interval(secs => %s))"
    task = db.execute(claim, (OWNER, LEASE)).fetchone()
    if task is None:
        return False
    task_id, epoch, payload = task
    done = threading.Event()
    heart = threading.Thread(target=beat, args=(task_id, epoch, done))
    heart.start()
    try:
        work(db, task_id, epoch, payload)
        print(f"{task_id}: completed under epoch {epoch}", flush=True)
    except LookupError as error:  # try again in a minute
        db.execute("select fencepost.fail_task(%s, %s, %s, %s, '1 minute')", (task_id, epoch, OWNER, str(error)))
        print(f"{task_id}: {error}", flush=True)
    except psycopg.Error as error:
        if error.sqlstate != "OB001":
            raise  # the lease expires, and the task is claimed again
        db.execute("select fencepost.worker_failed(%s, lease_lost => true)", (OWNER,))  # nothing of ours has stayed: say it
        print(f"{task_id}: somebody else has it now", flush=True)
    finally:
        done.set()
        heart.join()
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with psycopg.connect(DATABASE, autocommit=True) as db:
        while not stop.is_set():
            if not turn(db):
                stop.wait(1)
