"""An HTTP consumer that makes each effect once: Python's standard library and psycopg 3.

    DATABASE_URL=postgresql://... [WEBHOOK_SECRET=whsec_...] [PORT=8080] python3 consumer.py

The inbox (src/inbox/schema.sql) decides inside the transaction that makes the effect: the key first, the epoch second.
"""

import base64
import hashlib
import hmac
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg

DATABASE = os.environ["DATABASE_URL"]
SECRET = base64.b64decode(os.environ.get("WEBHOOK_SECRET", "").removeprefix("whsec_"))
SCOPE = "billing"  # our name for the fencepost database that sends to us
STATUS = {"applied": 200, "duplicate": 200, "stale": 412, "conflict": 422, "in-progress": 409}
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


def signed(headers, body):
    """Standard Webhooks 1.0: one of the signatures is ours, and the time is within five minutes of now."""
    key, sent = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not sent.isdigit() or abs(time.time() - int(sent)) > 300:
        return False
    mac = hmac.digest(SECRET, f"{key}.{sent}.".encode() + body, "sha256")
    expected = b"v1," + base64.b64encode(mac)
    return any(hmac.compare_digest(expected, one.encode()) for one in headers.get("webhook-signature", "").split(" "))


class Consumer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps the relay's connections open

    def do_POST(self):
        key, body = self.headers.get("webhook-id"), self.rfile.read(int(self.headers.get("content-length", 0)))
        if key is None or (SECRET and not signed(self.headers, body)):
            return self.answer(401 if key else 400)
        try:
            with psycopg.connect(DATABASE, autocommit=True) as db:
                verdict, current = apply(db, key, body)
        except psycopg.Error as error:  # whether it committed is unknown: the relay comes again with the same key
            print(f"{key}: {error}", flush=True)
            return self.answer(503)
        suffix = f"; current={current}" if verdict == "stale" else ""
        self.answer(STATUS[verdict], f'{verdict}; key="{key}"{suffix}')

    def answer(self, status, ack=None):
        self.send_response(status)
        if ack:
            self.send_header("Outbox-Ack", ack)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    with psycopg.connect(DATABASE) as db:
        db.execute(INBOX)
        db.execute(OURS)
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", 8080))), Consumer)
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
