"""The part of a Prefect server that keeps variables, for tests that cannot wait half a minute for the real one.

`test_slots_on_a_server.py` holds the real one to the same contract.
"""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings


class Variables:
    """The variables, by name, and what the server is told to do wrong.

    Attributes:
        refuse: Status that every request gets; 0 answers them.
        lose_answers: So many changes are made and then answered with 503.
    """

    def __init__(self):
        self.kept, self.lock = {}, threading.Lock()
        self.refuse, self.lose_answers = 0, 0
        self.asked = []

    def age(self, name, seconds):
        """Make a variable look older."""
        then = datetime.fromisoformat(self.kept[name]["updated"]).timestamp() - seconds
        self.kept[name]["updated"] = datetime.fromtimestamp(then, UTC).isoformat()

    def answer(self, method, path, body):
        """Status and content."""
        with self.lock:
            self.asked.append((method, path))
            if self.refuse:
                return self.refuse, None
            found = self._change(method, path, body)
            if method != "GET" and self.lose_answers:
                self.lose_answers -= 1
                return 503, None
            return found

    def _change(self, method, path, body):
        now = datetime.now(UTC).isoformat()
        last = path.rstrip("/").rpartition("/")[2]
        if method == "POST":
            if body["name"] in self.kept:
                return 409, None
            self.kept[body["name"]] = {**body, "id": str(uuid4()), "updated": now}
            return 201, self.kept[body["name"]]
        found = next((one for one in self.kept.values() if last in (one["name"], one["id"])), None)
        if found is None:
            return 404, None
        if method == "GET":
            return 200, found
        if method == "DELETE":
            del self.kept[found["name"]]
        else:
            found |= {**body, "updated": now}
        return 204, None


@contextmanager
def variables_server():
    """Variables behind HTTP; Prefect's clients in the block use them."""
    variables = Variables()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.removeprefix("/api")
            status, content = variables.answer(self.command, path, json.loads(body) if body else None)
            data = b"" if status == 204 else json.dumps(content).encode()
            self.send_response_only(status)
            self.send_header("Date", format_datetime(datetime.now(UTC), usegmt=True))
            self.send_header("Retry-After", "0")  # Prefect's client waits for two seconds after a 503 otherwise
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_any

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    try:
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}):
            yield variables
    finally:
        server.shutdown()
        server.server_close()
