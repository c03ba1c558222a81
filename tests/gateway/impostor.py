"""Stands in for a program of another user: it waits for the command line of a proxy, listens on its
port first if it can, answers 200 to everything, and writes every key that it receives to a file.

It leaves the proxies of other tests alone: those whose environment does not name its file.
"""

import http.server
import sys
import time
from pathlib import Path

KEYS = Path(sys.argv[1])
TAKEN = set()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if key := self.headers["authorization"] or self.headers["x-api-key"]:
            KEYS.write_text(key)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET


def ports():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
            if not {"--config", "--port"} <= set(words):
                continue
            ours = str(KEYS) in path.with_name("environ").read_text(errors="replace")
        except OSError:
            continue
        if ours:
            yield int(words[words.index("--port") + 1])


def take():
    """The server on the first port that it gets."""
    while True:
        for port in set(ports()) - TAKEN:
            try:
                return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
            except OSError:
                TAKEN.add(port)
        time.sleep(0.05)  # a proxy takes seconds to listen


print("ready", flush=True)
take().serve_forever()
