"""The part of a Prefect server that stores variables, for tests that cannot wait half a minute for a real one.

`test_slots_on_a_server.py` runs the same contract against a real one.
"""

import json
import re
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import UUID, uuid4

from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings

_NAME = re.compile(r"[A-Za-z0-9_-]{1,255}")


class Variables:
    """The variables, by name, and the faults to simulate.

    Attributes:
        refuse: Status that every request gets; 0 answers them.
        lose_answers: So many changes are made and then answered with 503.
        before: Called with method and path before a request is answered: what others do meanwhile.
    """

    def __init__(self, skew_s):
        self.kept, self.lock = {}, threading.RLock()
        self.refuse, self.lose_answers = 0, 0
        self.before = lambda method, path: None
        self.asked = []
        self._skew = timedelta(seconds=skew_s)

    def now(self):
        """The server's clock, which is not its clients'."""
        return datetime.now(UTC) + self._skew

    def put(self, name, value):
        """Make a variable, as another client does; its id."""
        with self.lock:
            return self._change("POST", "/variables/", {"name": name, "value": value})[1]["id"]

    def age(self, name, seconds):
        """Make a variable look older."""
        then = datetime.fromisoformat(self.kept[name]["updated"]).timestamp() - seconds
        self.kept[name]["updated"] = datetime.fromtimestamp(then, UTC).isoformat()

    def answer(self, method, path, body):
        """Status and content."""
        self.before(method, path)
        with self.lock:
            self.asked.append((method, path))
            if self.refuse:
                return self.refuse, None
            answer = self._change(method, path, body)
            if method != "GET" and self.lose_answers:
                self.lose_answers -= 1
                return 503, None
            return answer

    def _change(self, method, path, body):
        """The routes of Prefect's API: an id and a name have different ones, and no id is taken for a name."""
        now = self.now().isoformat()
        if method == "POST":
            if path != "/variables/" or not _NAME.fullmatch(body["name"]):
                return (405 if path != "/variables/" else 422), None
            if body["name"] in self.kept:
                return 409, None
            self.kept[body["name"]] = {"tags": [], **body, "id": str(uuid4()), "created": now, "updated": now}
            return 201, self.kept[body["name"]]
        field, wanted = _wanted(path)
        variable = next((kept for kept in self.kept.values() if field and kept[field] == wanted), None)
        if variable is None:
            return 404, None
        if method == "GET":
            return 200, variable
        if method == "DELETE":
            del self.kept[variable["name"]]
        else:
            variable |= {**body, "updated": now}
        return 204, None


def _wanted(path):
    """Field and value in a path: `/variables/name/{name}` or `/variables/{id}`; neither in other paths."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["variables", "name"] and len(parts) == 3:
        return "name", parts[2]
    if parts[:1] == ["variables"] and len(parts) == 2:
        with suppress(ValueError):  # Prefect has no route for what is no UUID
            return "id", str(UUID(parts[1]))
    return "", ""


@contextmanager
def variables_server(skew_s=-7200.0):
    """Variables behind HTTP; Prefect's clients in the block use them.

    Args:
        skew_s: By how much the server's clock is ahead of the clients'.
    """
    variables = Variables(skew_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.removeprefix("/api")
            status, content = variables.answer(self.command, path, json.loads(body) if body else None)
            data = b"" if status == 204 else json.dumps(content).encode()
            self.send_response_only(status)
            self.send_header("Date", format_datetime(variables.now(), usegmt=True))
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
