"""The train stage with an objective of frames: the alignments' content is part of the address, their place is not."""

import shutil

import numpy as np
import pytest
import yaml
from support import copy_finished, tiny_document

from speech.alignments import Alignment, AlignmentInfo, Span, write_alignments
from speech.hmm.priors import log_priors
from storage.index import ShardIndex
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.stages.base import Run, StageError
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_job

STATES = 7


def align(run, folder, shift=0):
    """Alignments of both sets, with made-up states."""
    counts = np.zeros(STATES, dtype=np.int64)
    for name in ("train", "valid"):
        index = ShardIndex.read(run.result("shard").store.child(name))
        made = []
        for k, utterance in enumerate(index.column("id")):
            states = ((np.arange(20) // 3 + k + shift) % STATES).astype(np.int32)
            made.append(Alignment(utterance, (), (Span("SIL", 0, 20),), pdfs=states))
            counts += np.bincount(states, minlength=STATES) * (name == "train")
        write_alignments(folder / f"{name}.parquet", AlignmentInfo(10.0, STATES, "ab" * 32), made)
    return counts


def hybrid(folder, **train):
    document = tiny_document()
    document["train"] |= {"objective": {"kind": "frame_cross_entropy", "alignments": str(folder)}, **train}
    document["decode"] = {"kind": "graph", "graph": "graph.fst", "words": "words.txt"}
    return document


def ready(document):
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


def test_training_key_depends_on_the_alignments_content(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    counts = align(finished, tmp_path / "one")
    run = ready(hybrid(tmp_path / "one"))
    key = TRAIN.output(run).key
    assert key != finished.result("train").key
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert TRAIN.output(ready(hybrid(tmp_path / "two"))).key == key
    align(finished, tmp_path / "two", shift=1)
    assert TRAIN.output(ready(hybrid(tmp_path / "two"))).key != key

    job = make_job(run, TRAIN.output(run))
    assert job.task.alignments_url == f"file://{tmp_path}/one"
    assert job.task.spec.states.log_priors == log_priors(counts)
    assert job.task.spec.build_model().vocab_size == STATES


def test_missing_alignments_are_named(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    with pytest.raises(StageError, match=r"needs alignments: add a section align, or name a folder"):
        TRAIN.output(ready(hybrid("")))


def test_folder_is_relative_to_the_configuration(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.yaml").write_text(yaml.safe_dump(hybrid("aligned")))
    objective = load_config(tmp_path / "sub" / "config.yaml").train.objective
    assert objective.alignments == str(tmp_path / "sub" / "aligned")


def test_segments_need_stored_features(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.segments are cut from stored features"):
        parse_config(hybrid(tmp_path, segments={}))
    document = hybrid(tmp_path, segments={}, augment={"enabled": False})
    document["features"] = {**document.get("features", {}), "stored": True, "cmvn": "global"}
    assert parse_config(document).train.segments.frames == 21


def test_decoder_of_tokens_is_refused(tmp_path):
    document = hybrid(tmp_path)
    document["decode"] = {"kind": "greedy"}
    with pytest.raises(
        ConfigError, match=r"decode\.kind greedy does not search what .* of kind hybrid puts out: use graph"
    ):
        parse_config(document)
