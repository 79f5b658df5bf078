"""Pure functions over many pieces of work, in processes of their own or in this one, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from devices.worker_processes import starting_workers, worker_pool

Result = TypeVar("Result")


def in_processes(function: Callable[..., Result], pieces: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Result]:
    """Yields the function's result for each piece of work, in order.

    Args:
        function: A function of a module, called as `function(*piece)`.
        pieces: The arguments of each call; taken as they are needed, two for each process ahead.
        workers: Number of processes; below 2 the calls are made here.

    Raises:
        RuntimeError: A process was killed, as the system does when memory runs out.
    """
    iterator = iter(pieces)
    first = list(islice(iterator, 2))
    pieces = chain(first, iterator)
    if workers < 2 or len(first) < 2:  # starting a process costs more than most single pieces
        yield from (function(*piece) for piece in pieces)
        return
    with worker_pool(workers) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for piece in pieces:
                with starting_workers():
                    waiting.append(pool.submit(function, *piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that estimates the language model was killed, perhaps because memory ran out: "
                "use fewer workers or smaller blocks"
            ) from error
        finally:
            for future in waiting:
                future.cancel()
