"""In rare cases ZeroMQ never ends a context, although nothing is open: a process that closed its connection hung."""

import threading

import zmq

from training.coordinator.client import CoordinatorClient
from training.processes import sockets


def test_closing_a_connection_takes_bounded_time(monkeypatch, caplog):
    never = threading.Event()
    monkeypatch.setattr(zmq.Context, "term", lambda context: never.wait())
    monkeypatch.setattr(sockets, "END_S", 0.05)
    client = CoordinatorClient("127.0.0.1:1", None)
    client.close()
    assert "has not ended within 0.05 s" in caplog.text
    never.set()


def test_end_context_terminates_the_context():
    context = zmq.Context()
    sockets.end_context(context)
    assert context.closed
