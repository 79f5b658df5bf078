"""Parallel work on shards: in threads, in processes, or on a Dask or Ray cluster, through Prefect's task runners.

    for done in map_pieces(config.runner, "tasks.stages.shard:shard_piece", pieces, label="shard train"):
        ...

A piece of work is a JSON object (URLs, shard numbers, settings), and so is its result. Data are read from and written
to the object store, so a worker on another machine needs only the store and this package. Within a flow run every piece
is a task run in the UI; without one, plain threads or processes are used.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from configurable.extras import install_remedy
from configurable.wording import counted
from devices.worker_processes import begin_worker, starting_workers, worker_pool
from tasks.config.pipeline import RunnerConfig
from tasks.stages import progress
from tasks.stages.base import StageError

Piece = dict[str, Any]
_LARGEST = 8
"""Maximum number of shards in a piece; bounds the work lost with a worker."""
_AHEAD = 2
"""Pieces submitted per worker: keeps workers busy and bounds memory."""
_POOLS = 4
"""Maximum number of process pools, started one after another when one breaks."""
_SAY_S = 60.0
"""Seconds between two messages of a run that waits for a cluster."""
_NO_WORKERS_S = 300.0
"""Seconds after which a run that waits for a cluster without workers ends."""
Answer = Callable[[float], tuple[Any]]
"""Waits for a piece's result for some seconds; raises `_NotYetError` if there is none, and the piece's exceptions."""
_log = logging.getLogger(__name__)


class _NotYetError(Exception):
    """A piece is not finished."""


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
                results = deque(submitter.submit(name, piece, label) for piece in window)
                while window:
                    result = _awaited(results.popleft(), submitter, label, self._runner)
                    window.popleft()
                    yield result
                    for piece in islice(source, 1):
                        window.append(piece)
                        results.append(submitter.submit(name, piece, label))
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

    def submit(self, name: str, piece: Piece, label: str) -> Answer:
        with starting_workers():
            future: Future[Any] = self._pool.submit(do_piece, name, piece)

        def answer(seconds: float) -> tuple[Any]:
            try:
                return (future.result(seconds),)
            except TimeoutError as error:
                raise error if future.done() else _NotYetError from error

        return answer

    def workers(self) -> int | None:
        return None

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class _OfPrefect(AbstractContextManager["_OfPrefect"]):
    """One of Prefect's task runners."""

    def __init__(self, runner: RunnerConfig) -> None:
        self._runner, self._kind = task_runner(runner), runner.kind

    def __enter__(self) -> "_OfPrefect":
        with starting_workers():
            self._runner.__enter__()
        return self

    def submit(self, name: str, piece: Piece, label: str) -> Answer:
        text = f"{label} {piece.get('name', '')}".strip()
        with starting_workers():
            future = self._runner.submit(piece_task, {"name": name, "piece": piece, "label": text})

        def answer(seconds: float) -> tuple[Any]:
            try:
                return (future.result(seconds, raise_on_failure=True),)
            except TimeoutError as error:
                # the piece may have raised it: then there is a final state
                raise error if getattr(future, "_final_state", None) else _NotYetError from error

        return answer

    def workers(self) -> int | None:
        """Number of the cluster's workers; None if it is this machine."""
        if self._kind == "dask":
            return len(self._runner._client.scheduler_info(n_workers=-1)["workers"])
        if self._kind == "ray":
            return sum(bool(node["Alive"]) for node in import_module("ray").nodes())
        return None

    def __exit__(self, *failure: Any) -> None:
        self._runner.__exit__(*failure)


def _awaited(answer: Answer, submitter: Any, label: str, runner: RunnerConfig) -> Any:
    """Wait for the answer to a piece; every minute, say for whom a cluster's user waits.

    Raises:
        StageError: The cluster has had no worker for `_NO_WORKERS_S`, or the piece has taken `runner.wait_hours`.
    """
    whom = (
        f"the {runner.kind} cluster {runner.address}".rstrip() if runner.cluster else f"{runner.kind} of this machine"
    )
    start = with_workers = time.monotonic()
    while True:
        try:
            return answer(_SAY_S)[0]
        except _NotYetError:
            now, workers = time.monotonic(), _workers_of(submitter)
        with_workers = now if workers != 0 else with_workers
        if now - with_workers > _NO_WORKERS_S:
            raise StageError(
                f"{label}: {whom} has had no worker for {_NO_WORKERS_S / 60:.0f} minutes: start workers, and run again"
            )
        if now - start > 3600 * runner.wait_hours:
            raise StageError(
                f"{label}: a piece of work has taken longer than {runner.wait_hours:g} hours on {whom}: see what its "
                "workers do, or raise runner.wait_hours"
            )
        if runner.cluster:
            text = f"waiting for {whom}, {counted(workers or 0, 'worker')}, for {int((now - start) / 60)} min so far"
            progress.announce(label.partition(" ")[0], text)


def _workers_of(submitter: Any) -> int | None:
    try:
        workers: int | None = submitter.workers()
    except Exception:  # after any error of the cluster's client, none of its workers can be reached
        return 0
    return workers


def check_runner(runner: RunnerConfig, within_flow: bool) -> None:
    """Check that a run can use a runner, before it does any work.

    Args:
        runner: The configuration.
        within_flow: Whether the run is a flow run.

    Raises:
        StageError: If it is a cluster and the run is none, or its package is missing.
    """
    if not runner.cluster:
        return
    if not within_flow:
        raise StageError(
            f"runner.kind {runner.kind} needs a flow run: leave out --no-prefect, or use runner.kind threads"
        )
    if find_spec(f"prefect_{runner.kind}") is None:
        raise StageError(
            f"runner.kind {runner.kind} needs the package prefect-{runner.kind}: {install_remedy(runner.kind)}"
        )


def _submitter(runner: RunnerConfig, traced: bool = True) -> Any:
    within_flow = FlowRunContext.get() is not None
    check_runner(runner, within_flow)
    return _OfPrefect(runner) if within_flow and (traced or runner.cluster) else _Plain(runner)


def task_runner(runner: RunnerConfig) -> Any:
    """The Prefect task runner of a configuration; see `check_runner`."""
    count = runner.count
    if runner.kind == "threads":
        return ThreadPoolTaskRunner(max_workers=count)
    if runner.kind == "processes":
        return ProcessPoolTaskRunner(max_workers=count, initializer=begin_worker)
    module = import_module(f"prefect_{runner.kind}")
    if runner.kind == "dask":
        here = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
        return module.DaskTaskRunner(**({"address": runner.address} if runner.address else {"cluster_kwargs": here}))
    here = {"num_cpus": count, "include_dashboard": False}
    return module.RayTaskRunner(**({"address": runner.address} if runner.address else {"init_kwargs": here}))
