"""Parallel work on shards: in threads, in processes, or on a Dask or Ray cluster, through Prefect's task runners.

    for done in map_pieces(config.runner, "tasks.stages.shard:shard_piece", pieces, label="shard train"):
        ...

A piece of work is a JSON object (URLs, shard numbers, settings), and so is its result. Data are read from and written
to the object store, so a worker on another machine needs only the store and this package. Within a flow run every piece
is a task run in the UI; without one, plain threads or processes are used.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import islice
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from configurable.extras import install_remedy
from speech.worker_processes import begin_worker, starting_workers, worker_pool
from tasks.config.pipeline import RunnerConfig
from tasks.stages.base import StageError

Piece = dict[str, Any]
_LARGEST = 8
"""Maximum number of shards in a piece; bounds the work lost with a worker."""
_AHEAD = 2
"""Pieces submitted per worker: keeps workers busy and bounds memory."""
_POOLS = 4
"""Maximum number of process pools, started one after another when one breaks."""
_log = logging.getLogger(__name__)


def find_work(name: str) -> Callable[[Piece], Any]:
    """The function named by "module:function"; only functions of this package are allowed."""
    module, _, function = name.partition(":")
    if module.partition(".")[0] != "tasks":
        raise ValueError(f"{name!r} is not a function of this package")
    work: Callable[[Piece], Any] = getattr(import_module(module), function)
    return work


def do_piece(name: str, piece: Piece) -> Any:
    """Do one piece of work."""
    return find_work(name)(piece)


_decorate: Any = task(name="piece", persist_result=False, cache_policy=NO_CACHE, task_run_name="{label}")


@_decorate  # type: ignore[untyped-decorator]
def piece_task(name: str, piece: Piece, label: str) -> Any:
    """One piece of work as a Prefect task."""
    return do_piece(name, piece)


class Workers(AbstractContextManager["Workers"]):
    """Workers that stay alive between several calls of `map`; use it as a context manager.

    Args:
        runner: Where the pieces are done.
        traced: Whether each piece is a task run in the UI, if there is a flow run; `dask` and `ray` always are. Many
            short pieces are better done without.
    """

    def __init__(self, runner: RunnerConfig, traced: bool = True) -> None:
        self._runner, self._traced = runner, traced
        self._open: Any = None

    def map(self, name: str, pieces: Iterable[Piece], label: str) -> Iterator[Any]:
        """Do pieces of work in parallel; arguments, results and errors as for `map_pieces`."""
        source = iter(pieces)
        window = deque(islice(source, _AHEAD * self._runner.count))
        for _ in range(_POOLS):
            try:
                submitter = self._submitter()
                results = deque(submitter.submit(name, one, label) for one in window)
                while window:
                    result = results.popleft()()
                    window.popleft()
                    yield result
                    for one in islice(source, 1):
                        window.append(one)
                        results.append(submitter.submit(name, one, label))
                return
            except BrokenProcessPool:
                self._close(*sys.exc_info())
                _log.warning("%s: a worker process was killed; its work is repeated", label)
        raise StageError(
            f"{label}: worker processes were killed {_POOLS} times, from outside or because memory ran out: lower "
            "runner.workers, or use runner.kind threads"
        )

    def _submitter(self) -> Any:
        if self._open is None:
            self._open = _submitter(self._runner, self._traced).__enter__()
        return self._open

    def _close(self, *failure: Any) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(*failure)

    def __exit__(self, *failure: Any) -> None:
        self._close(*failure)


def map_pieces(runner: RunnerConfig, name: str, pieces: Iterable[Piece], label: str) -> Iterator[Any]:
    """Do pieces of work in parallel; pieces of a killed process are repeated.

    Args:
        runner: Where to do them.
        name: The function, as "module:function"; it takes a piece and returns a JSON value.
        pieces: The pieces; consumed a few at a time.
        label: Name of the task runs; the piece's `name` is appended.

    Yields:
        Results of the pieces, in order.

    Raises:
        StageError: If the runner's package is missing, dask or ray is used outside a flow run, or processes die
            repeatedly.
        Exception: The exception of a piece; pieces that have not started are dropped.
    """
    with Workers(runner) as workers:
        yield from workers.map(name, pieces, label)


def share_out(count: int, runner: RunnerConfig) -> Iterator[list[int]]:
    """Divide the numbers 0 to `count` - 1 into pieces: enough for all workers, few enough for the UI."""
    size = max(1, min(_LARGEST, count // (4 * runner.count)))
    for start in range(0, count, size):
        yield list(range(start, min(start + size, count)))


def piece_name(numbers: list[int]) -> str:
    """Name of a piece in its task run: the range of its shards."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


class _Plain(AbstractContextManager["_Plain"]):
    """Threads or processes without Prefect."""

    def __init__(self, runner: RunnerConfig) -> None:
        count = runner.count
        self._pool: Executor = ThreadPoolExecutor(count) if runner.local else worker_pool(count)

    def submit(self, name: str, piece: Piece, label: str) -> Callable[[], Any]:
        with starting_workers():
            future: Future[Any] = self._pool.submit(do_piece, name, piece)
        return future.result

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class _OfPrefect(AbstractContextManager["_OfPrefect"]):
    """One of Prefect's task runners."""

    def __init__(self, runner: RunnerConfig) -> None:
        self._runner = task_runner(runner)

    def __enter__(self) -> "_OfPrefect":
        with starting_workers():
            self._runner.__enter__()
        return self

    def submit(self, name: str, piece: Piece, label: str) -> Callable[[], Any]:
        text = f"{label} {piece.get('name', '')}".strip()
        with starting_workers():
            future = self._runner.submit(piece_task, {"name": name, "piece": piece, "label": text})
        return lambda: future.result(raise_on_failure=True)

    def __exit__(self, *failure: Any) -> None:
        self._runner.__exit__(*failure)


def _submitter(runner: RunnerConfig, traced: bool = True) -> Any:
    if FlowRunContext.get() is not None and (traced or runner.kind in ("dask", "ray")):
        return _OfPrefect(runner)
    if runner.kind in ("dask", "ray"):
        raise StageError(f"runner.kind {runner.kind} needs a flow run: use `starling run`, or runner.kind threads")
    return _Plain(runner)


def task_runner(runner: RunnerConfig) -> Any:
    """The Prefect task runner of a configuration.

    Raises:
        StageError: If its package is not installed.
    """
    count = runner.count
    if runner.kind == "threads":
        return ThreadPoolTaskRunner(max_workers=count)
    if runner.kind == "processes":
        return ProcessPoolTaskRunner(max_workers=count, initializer=begin_worker)
    try:
        module = import_module(f"prefect_{runner.kind}")
    except ImportError as error:
        raise StageError(
            f"runner.kind {runner.kind} needs the package prefect-{runner.kind}: {install_remedy(runner.kind)}"
        ) from error
    if runner.kind == "dask":
        here = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
        return module.DaskTaskRunner(**({"address": runner.address} if runner.address else {"cluster_kwargs": here}))
    here = {"num_cpus": count, "include_dashboard": False}
    return module.RayTaskRunner(**({"address": runner.address} if runner.address else {"init_kwargs": here}))
