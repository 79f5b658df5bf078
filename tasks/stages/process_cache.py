"""Results that pieces of a stage share within a process."""

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _CachedOnce(Generic[P, T]):
    """A function with its cache."""

    def __init__(self, function: Callable[P, T], maxsize: int) -> None:
        self._cached, self._lock = lru_cache(maxsize)(function), Lock()
        self.__doc__ = function.__doc__
        self.cache_clear = self._cached.cache_clear

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return self._cached(*args, **kwargs)  # type: ignore[arg-type]


def cached_once(maxsize: int) -> Callable[[Callable[P, T]], _CachedOnce[P, T]]:
    """Cache a function's last results like `functools.lru_cache`, but make each only once.

    Threads that ask at the same time wait for the first one. Without that, each would make a result of its own, of
    which the cache keeps one: a temporary folder that nobody else refers to is removed at once.

    Args:
        maxsize: Results that are kept. Hold the result itself while you use it, not only the name of its folder.
    """
    return lambda function: _CachedOnce(function, maxsize)
