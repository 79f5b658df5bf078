"""Functions that numba compiles to machine code, which is kept for later processes.

A function is compiled when it is first called with arguments of some types. The code is kept in `NUMBA_CACHE_DIR`, by
default in the user's cache folder, by the content of the module's file: copies of this project, such as that in a
registered model, share it. If neither that folder nor the module's own can be written, every process compiles for
itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numba
from numba.core import caching, config
from typing_extensions import override

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_WAIT_S = 120.0
"""How long a process waits while another one compiles, at most; compilation takes some ten seconds of an idle core."""


class _ByContent(caching.UserWideCacheLocator):  # type: ignore[misc]
    """A folder for the code of all files of the same content, wherever they are."""

    _cache_path: str

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        content = hashlib.sha256(Path(py_file).read_bytes()).hexdigest()
        folder = Path(config.CACHE_DIR or Path(self._cache_path).parent)
        self._cache_path = str(folder / f"{Path(py_file).stem}_{content[:32]}")


class _Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ByContent, caching.InTreeCacheLocator)


class _Kept(caching.FunctionCache):  # type: ignore[misc]
    """Keeps a function's code in files; damaged ones and full disks only cost time."""

    _impl_class = _Files

    @override
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
        except Exception as error:  # files that were written halfway fail in many ways
            log.debug("compiled code in %s cannot be read (%r)", self.cache_path, error)
            code = None
            self.flush()
        if code is None:
            _tell()
        return code

    @override
    def save_overload(self, sig: Any, data: Any) -> None:
        with self._disk():
            super().save_overload(sig, data)

    @override
    def flush(self) -> None:
        with self._disk():
            super().flush()

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.debug("compiled code cannot be kept in %s (%r)", self.cache_path, error)


_told = False


def _tell() -> None:
    """Say once that this process compiles."""
    global _told
    if not _told:
        log.warning("the search is compiled (numba): some ten seconds of one core, once on this machine")
    _told = True


def compiled(function: F) -> F:
    """Compile a function with numba when it is first called; it runs without Python's lock."""
    dispatcher: Any = numba.njit(nogil=True, no_cfunc_wrapper=True)(function)
    try:
        dispatcher._cache = _Kept(function)  # what `cache=True` does, with our places of files
    except RuntimeError as error:  # no folder can be written
        log.debug("%s", error)
    kept: F = dispatcher
    return kept


@contextmanager
def one_compiles(function: Callable[..., Any]) -> Iterator[None]:
    """Let processes in which a function is compiled in this block take turns, so that one compiles and the others read.

    Args:
        function: A compiled function, called in the block.
    """
    folder = getattr(function, "_cache").cache_path  # noqa: B009 - a function to type checkers
    with ExitStack() as held:
        try:
            if folder is not None:
                _lock(held.enter_context((Path(folder) / "lock").open("a")))
        except OSError as error:  # a folder that has gone, or a file system without locks
            log.debug("other processes may compile at the same time (%r)", error)
        yield


def _lock(file: IO[str]) -> None:
    """Lock a file until it is closed; after `_WAIT_S` seconds go on without."""
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return
