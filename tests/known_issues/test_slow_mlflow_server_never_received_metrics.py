"""All requests to MLflow had the same time limit: a slower server received nothing until the register stage."""

from contextlib import contextmanager

import pytest
from support import wait_until

from tasks.tracking import forwarding
from tasks.tracking.forwarding import Forwarder


class SlowServer:
    """Accepts a batch if the request's time limit is long enough."""

    def __init__(self, needs_s):
        self.needs_s, self.batches, self.given = needs_s, 3, []
        self._request_s = 0

    @contextmanager
    def impatient(self, seconds):
        self._request_s = seconds
        yield

    def send(self):
        self.given.append(self._request_s)
        if self._request_s < self.needs_s:
            raise TimeoutError("no answer")
        self.batches -= 1
        return False

    drain = send

    def end(self, status, reason):
        assert status == "FINISHED"

    def forget_connection(self):
        pass


@pytest.mark.parametrize(
    ("needs_s", "given"),
    [(5, [10, 10, 10]), (35, [10, 20, 40, 10, 20, 40, 10, 20, 40]), (80, [10, 20, 40, 80, 10, 20, 40, 80])],
)
def test_slow_server_is_given_more_time(needs_s, given, monkeypatch):
    server = SlowServer(needs_s)
    monkeypatch.setattr(forwarding, "impatient", server.impatient)
    monkeypatch.setattr(forwarding, "_SLOWEST_S", 0.002)
    with Forwarder(server, every_s=0.001) as forwarder:
        wait_until(lambda: server.batches <= 0, every_s=0.001)
    assert server.given[: len(given)] == given
    assert not forwarder.trouble or server.given[-1] < needs_s


def test_time_for_a_silent_server_is_bounded(monkeypatch):
    server = SlowServer(1000)
    monkeypatch.setattr(forwarding, "impatient", server.impatient)
    monkeypatch.setattr(forwarding, "_SLOWEST_S", 0.002)
    with Forwarder(server, every_s=0.001) as forwarder:
        wait_until(lambda: len(server.given) > 9, every_s=0.001)
    assert max(server.given) == 80
    assert "no answer" in forwarder.trouble
