"""An AMQP consumer that makes each effect once and says so: pika and psycopg 3.

    DATABASE_URL=postgresql://... AMQP_URL=amqp://... QUEUE=billing python3 amqp_consumer.py

Per message: one transaction of its own (the verdict, and the effect if it is ours to make), then the reply, then the
broker's ack. A crash in between brings the message again, and the inbox calls it a duplicate.
"""

import hashlib
import os
import re
import time
from pathlib import Path

import pika
import psycopg

QUEUE = os.environ.get("QUEUE", "billing")
SCOPE = "billing"  # our name for the fencepost database that sends to us
KEY = re.compile(r"[A-Za-z0-9_-]{1,128}:[1-9][0-9]*(:[1-9][0-9]*)?")
INBOX = (Path(__file__).parents[2] / "src/inbox/schema.sql").read_text().replace("{schema}", "inbox")
OURS = "create table if not exists payments (key text not null, body bytea not null)"


def apply(db, key, body):
    """The verdict, and the effect if it is ours to make, in one transaction."""
    with db.transaction():
        decide = "select verdict, current from inbox.apply(%s, %s, %s)"
        verdict, current = db.execute(decide, (SCOPE, key, hashlib.sha256(body).digest())).fetchone()
        if verdict == "applied":
            db.execute("insert into payments (key, body) values (%s, %s)", (key, body))
    return verdict, current


def reply(channel, asked, verdict, current):
    """Tells fencepost what became of the key. pika raises where the broker does not confirm or finds no queue."""
    headers = {name: asked.headers[name] for name in ("outbox-consumer", "outbox-ack-token")}
    headers["outbox-ack"] = verdict
    if verdict == "stale":
        headers["outbox-ack-current"] = current
    answer = pika.BasicProperties(correlation_id=asked.correlation_id, headers=headers, delivery_mode=2)
    channel.basic_publish("", asked.reply_to, b"", answer, mandatory=True)


def receive(channel, method, asked, body):
    if not KEY.fullmatch(asked.message_id or ""):  # not from fencepost
        return channel.basic_reject(method.delivery_tag, requeue=False)
    try:
        verdict, current = apply(db, asked.message_id, body)
    except psycopg.Error as error:  # whether it committed is unknown: the broker hands it out again
        print(f"{asked.message_id}: {error}", flush=True)
        verdict = "in-progress"
    if verdict == "in-progress":
        time.sleep(0.5)
        return channel.basic_nack(method.delivery_tag, requeue=True)
    if asked.reply_to:
        reply(channel, asked, verdict, current)
    channel.basic_ack(method.delivery_tag)


if __name__ == "__main__":
    db = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
    with db.transaction():
        db.execute(INBOX)
        db.execute(OURS)
    channel = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"])).channel()
    channel.confirm_delivery()
    channel.basic_qos(prefetch_count=20)
    channel.basic_consume(QUEUE, receive)
    print(f"consuming {QUEUE}", flush=True)
    channel.start_consuming()
