"""Steps of GMM-HMM training on shards, in threads of this process or in the workers of the pipeline's runner.

For workers in other processes, a step and its arguments are written to the object store, as are results
(`speech.hmm.serialization`); each shard's part of alignments and graphs goes to its worker only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any
from uuid import uuid4

import torch

from speech.hmm.serialization import STEPS, dump_value, load_value, step_parts
from speech.hmm.utterances import Shard, TrainingUtterance
from storage.objects import ObjectStore
from tasks.config.pipeline import RunnerConfig
from tasks.stages.align_data import StoredUtterance, opened
from tasks.stages.runner import Piece, Workers

_BY_UTTERANCE = ("alignments", "graphs")
"""Arguments that are mappings by utterance."""


class StepMapper(AbstractContextManager["StepMapper"]):
    """Applies steps to shards (`speech.hmm.train.Mapper`); use it as a context manager.

    Args:
        runner: Where the steps run.
        store: For arguments and results, which are deleted after use; not used by threads.
    """

    def __init__(self, runner: RunnerConfig, store: ObjectStore) -> None:
        self._runner, self._store = runner, store
        self._stack = ExitStack()
        self._threads: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        if runner.local:
            self._threads = self._stack.enter_context(ThreadPoolExecutor(runner.count))
        else:
            store.delete_tree("")  # of an attempt that was killed
            self._workers = self._stack.enter_context(Workers(runner, traced=False))

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def __call__(self, step: Callable[[Shard], Any], shards: Sequence[Shard]) -> Iterator[Any]:
        """Yields the step's result for each shard, in order."""
        if self._threads is not None:
            yield from self._threads.map(step, shards)
            return
        assert self._workers is not None
        name, args, keywords = step_parts(step)
        call = f"{name}-{uuid4().hex[:12]}"
        common = {key: value for key, value in keywords.items() if key not in _BY_UTTERANCE}
        self._store.write(f"{call}/step", dump_value((name, args, common)))
        pieces = (self._piece(call, number, shard, keywords) for number, shard in enumerate(shards))
        try:
            for result in self._workers.map("tasks.stages.align_steps:step_piece", pieces, name):
                found = load_value(self._store.read(result))
                self._store.delete(result)
                yield found
        finally:
            self._store.delete_tree(call)

    def _piece(self, call: str, number: int, shard: Shard, keywords: Mapping[str, Any]) -> Piece:
        names = {one.id for one in shard.utterances}
        own = {key: _part(keywords[key], names) for key in _BY_UTTERANCE if key in keywords}
        self._store.write(f"{call}/own-{number}", dump_value(own))
        source, rows = _rows(shard.utterances)
        return {
            "name": str(number),
            "store": self._store.url,
            "step": f"{call}/step",
            "own": f"{call}/own-{number}",
            "result": f"{call}/result-{number}",
            "features": source.store.url,
            "digest": source.index.digest,
            "rows": rows,
            "device": shard.device,
            "threads": max(1, torch.get_num_threads() // self._runner.count),
        }


def _part(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _rows(utterances: Sequence[TrainingUtterance]) -> tuple[Any, list[int]]:
    """The set of some stored utterances, and their rows."""
    stored = [one for one in utterances if isinstance(one, StoredUtterance)]
    assert len(stored) == len(utterances), "workers read features from the object store"
    sources = {one.source.store.url: one.source for one in stored}
    assert len(sources) == 1, "a shard has utterances of one set"
    return next(iter(sources.values())), [one.row for one in stored]


@lru_cache(maxsize=8)
def _shard(url: str, digest: str, rows: tuple[int, ...], device: str) -> Shard:
    """A shard; its transformed features are cached for further steps in this process."""
    return Shard(opened(url, digest).utterances(list(rows)), device)


@lru_cache(maxsize=2)
def _step(url: str, name: str) -> Any:
    return load_value(ObjectStore(url).read(name))


def step_piece(piece: Piece) -> str:
    """Apply a step to a shard; returns the name of the object with the result."""
    torch.set_num_threads(piece["threads"])
    store = ObjectStore(piece["store"])
    name, args, keywords = _step(piece["store"], piece["step"])
    own = load_value(store.read(piece["own"]))
    shard = _shard(piece["features"], piece["digest"], tuple(piece["rows"]), piece["device"])
    store.write(piece["result"], dump_value(STEPS[name](*args, shard=shard, **keywords, **own)))
    result: str = piece["result"]
    return result
