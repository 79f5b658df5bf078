"""Progress of long work, for listeners such as a terminal, Prefect's logs or a test.

Reports say how much of a stage is done, often and for bars. Announcements are lines to keep: one at the end of each
stage, one for each epoch of a training, and one for each of a GMM-HMM's trainings. At a stage's end, also by an error,
what shows its progress can be removed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")

Sink = Callable[[str, float, float, str], None]
"""Receives stage name, work done, total work, and a short note."""

Follower = Callable[[str, str], None]
"""Receives stage name and a line."""

Ender = Callable[[str], None]
"""Receives the name of a stage that has ended."""

_sinks: list[Sink] = []
_followers: list[Follower] = []
_enders: list[Ender] = []
_links: dict[str, dict[str, str]] = {}


def listening(sink: Sink) -> AbstractContextManager[None]:
    """Send progress to a sink while the block runs."""
    return _registered(_sinks, sink)


def following(follower: Follower) -> AbstractContextManager[None]:
    """Send announcements to a follower while the block runs."""
    return _registered(_followers, follower)


def ending(ender: Ender) -> AbstractContextManager[None]:
    """Report the ends of stages to an ender while the block runs."""
    return _registered(_enders, ender)


@contextmanager
def _registered(listeners: list[T], listener: T) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def end(stage: str) -> None:
    """Tell every listener that a stage has ended."""
    for ender in list(_enders):
        ender(stage)


def announce(stage: str, text: str) -> None:
    """Send a line of a stage to every follower."""
    for follower in list(_followers):
        follower(stage, text)


def followed() -> bool:
    """Whether there is a follower."""
    return bool(_followers)


def link(stage: str, text: str, url: str) -> None:
    """Set a link to details of a running stage; replaces an earlier link with the same text."""
    _links.setdefault(stage, {})[text] = url


def links(stage: str) -> dict[str, str]:
    """Links of a stage: URL by text."""
    return dict(_links.get(stage, {}))


def forget_links(stage: str) -> None:
    """Remove the links of a stage that has ended."""
    _links.pop(stage, None)


def report(stage: str, done: float, total: float, note: str = "") -> None:
    """Report a stage's progress to every listener."""
    for sink in list(_sinks):
        sink(stage, done, total, note)


class Parts:
    """Progress of a stage that works on one set after another, as a share of all of them.

    Args:
        stage: The stage.
        sizes: How much each set is of the whole, in order, such as its number of utterances.
    """

    def __init__(self, stage: str, sizes: Mapping[str, float]) -> None:
        self._stage, self._sizes = stage, dict(sizes)
        self._before = dict(zip(sizes, accumulate(sizes.values(), initial=0.0), strict=False))

    def report(self, name: str, done: float, total: float) -> None:
        """Report how much of a set is done."""
        size = self._sizes[name]
        report(self._stage, self._before[name] + size * done / max(total, 1), sum(self._sizes.values()), name)
