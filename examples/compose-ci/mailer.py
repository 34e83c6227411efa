"""Sends one mail per key, and says so. The first answer of all gets lost, as answers do."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

sent = {}
lost_one = False


class Mailer(BaseHTTPRequestHandler):
    def do_POST(self):
        global lost_one
        key = self.headers["webhook-id"]
        body = self.rfile.read(int(self.headers["content-length"]))
        # A real one keeps this in its database, in the transaction that makes the effect.
        seen = key in sent
        sent.setdefault(key, json.loads(body))
        if not lost_one:
            lost_one = True
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Outbox-Ack", f'{"duplicate" if seen else "applied"}; key="{key}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        body = json.dumps(sorted(mail["order"] for mail in sent.values())).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("", 8080), Mailer).serve_forever()
