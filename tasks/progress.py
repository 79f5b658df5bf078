"""Progress of long work: stages report, whoever runs them may listen (a terminal's progress bar, a test)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Sink = Callable[[str, float, float, str], None]
"""Receives stage name, work done, work in all, and a short note."""

_sinks: list[Sink] = []


@contextmanager
def listening(sink: Sink) -> Iterator[None]:
    """Send progress to a sink while the block runs."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def report(stage: str, done: float, total: float, note: str = "") -> None:
    """Tell every listener how far a stage is."""
    for sink in list(_sinks):
        sink(stage, done, total, note)
