"""Progress of long work: stages report, and callers may listen (a terminal's progress bar, a test)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Sink = Callable[[str, float, float, str], None]
"""Receives stage name, work done, work in all, and a short note."""

_sinks: list[Sink] = []
_links: dict[str, dict[str, str]] = {}


@contextmanager
def listening(sink: Sink) -> Iterator[None]:
    """Send progress to a sink while the block runs."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def link(stage: str, text: str, url: str) -> None:
    """Say where more is to be seen of a stage that is under way; the last link of a text counts."""
    _links.setdefault(stage, {})[text] = url


def links(stage: str) -> dict[str, str]:
    """What `link` was told of a stage."""
    return dict(_links.get(stage, {}))


def forget_links(stage: str) -> None:
    """A stage has ended."""
    _links.pop(stage, None)


def report(stage: str, done: float, total: float, note: str = "") -> None:
    """Tell every listener how far a stage is."""
    for sink in list(_sinks):
        sink(stage, done, total, note)
