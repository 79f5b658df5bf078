"""A process of `runner.kind: processes` that was killed (by hand, or for memory) failed the run: BrokenProcessPool."""

from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children

import pytest

from tasks.config.pipeline import RunnerConfig
from tasks.stages import runner
from tasks.stages.base import StageError

PROCESSES = RunnerConfig(kind="processes", workers=2)
PIECES = [{"name": str(number), "store": "memory://none", "shards": [], "sample_rate": 8000} for number in range(9)]


@pytest.mark.slow
def test_pieces_of_killed_processes_are_done_by_others():
    earlier = set(active_children())
    one_worker = RunnerConfig(kind="processes", workers=1)  # each process imports everything, before and after
    results = runner.map_pieces(one_worker, "tasks.stages.shard:shard_piece", iter(PIECES), "probe")
    assert next(results) == 0
    workers = set(active_children()) - earlier
    assert len(workers) == 1
    for process in workers:
        process.kill()
        process.join()
    assert list(results) == [0] * 8
    assert set(active_children()) <= earlier | workers


class DyingPool:
    """A pool that returns two results and then dies."""

    made = 0

    def __enter__(self):
        DyingPool.made += 1
        self.left = 2
        return self

    def __exit__(self, *_):
        pass

    def submit(self, name, piece, label):
        def result(wait_s):
            if not self.left:
                raise BrokenProcessPool("A process in the process pool was terminated abruptly")
            self.left -= 1
            return (int(piece["name"]),)

        return result


def test_dying_pools_lose_no_result_and_end_with_a_remedy(monkeypatch):
    monkeypatch.setattr(DyingPool, "made", 0)
    monkeypatch.setattr(runner, "_submitter", lambda *_: DyingPool())
    results = runner.map_pieces(PROCESSES, "none", iter(PIECES), "shard train")
    assert [next(results) for _ in range(8)] == list(range(8))
    with pytest.raises(StageError, match=r"shard train: .* killed 4 times.* lower runner\.workers"):
        next(results)
    assert DyingPool.made == 4
