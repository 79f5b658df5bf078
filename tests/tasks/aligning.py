"""Speech that a GMM-HMM has aligned, once for the tests of all modules."""

import functools
import json
import math
import os

from support import (
    copy_database,
    copy_outputs,
    environment,
    give_mlflow,
    made_once,
    shared_folder,
    tiny_document,
)

from storage.index import ShardIndex
from tasks.config.pipeline import parse_config
from tasks.stages import progress
from tasks.stages.align import ALIGN
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD

STAGE = {"leaves": 30, "gaussians": 90, "iterations": 3, "growing": 2, "realign": [2], "estimate": [2]}
SIZES = {
    "mono": STAGE | {"realign": [2, 3], "gaussians": 60}, "tri": STAGE, "lda": STAGE, "sat": STAGE,
    "lda_dim": 20, "leaf_frames": 10.0, "minimum_occupancy": 3.0, "beam": 20.0,
}  # fmt: skip


def aligned_run(home, stage="sat", **fields):
    """A run whose speech is sharded and aligned."""
    run = Run(parse_config(tiny_document(align=SIZES | {"stage": stage}, **fields)), "r")
    if not (home / "mlflow").exists():
        give_mlflow(home)
    for before in (PREPARE, SHARD):
        before.execute(run)
    return run


@functools.cache
def aligned_speech():
    """A data folder, a run that was aligned in it, and what was reported; other modules use them, too.

    The first test process aligns; the others copy its data folder, which tests may change.
    """
    home, notes = shared_folder() / f"aligned-{os.getpid()}", []
    with made_once("aligned") as made, environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        is_first = not (made / "notes.json").exists()
        if not is_first:
            copy_outputs(made, home)
            copy_database(made / "mlflow.db", home / "mlflow" / "mlflow.db")
        run = aligned_run(home)
        with progress.listening(lambda *report: notes.append(report)):
            ALIGN.execute(run)
        if is_first:
            copy_outputs(home, made)
            copy_database(home / "mlflow" / "mlflow.db", made / "mlflow.db")
            (made / "notes.json").write_text(json.dumps(notes))
        notes = [tuple(note) for note in json.loads((made / "notes.json").read_text())]
    return home, run, notes


def unigrams(words):
    """An ARPA file in which all words are equally probable."""
    cost = -math.log10(2 * len(words))
    lines = ["\\data\\", f"ngram 1={len(words) + 2}", "", "\\1-grams:", "-99\t<s>", "-0.30103\t</s>"]
    return "\n".join([*lines, *(f"{cost:.5f}\t{word}" for word in words), "", "\\end\\", ""])


def run_texts(run):
    return ShardIndex.read(run.result("shard").store.child("train")).column("text")
