"""Language models that are networks: the engine trains them, within the stage lm."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import ROOT, copy_finished, load_beside, tiny_document, wait_until

from recognition.systems.language_model import LanguageModelTaskConfig
from speech.lm import LmError, LmSpec, LstmConfig, read_network
from speech.lm.vocabulary import END_ID, SPECIAL, START_ID
from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks import STAGES
from tasks.config.lm_training import LmTrainConfig
from tasks.config.pipeline import ConfigError, parse_config
from tasks.stages.base import Run, StageError
from tasks.stages.lm import LM, figures
from tasks.stages.lm_network import write_text
from tasks.stages.shard import set_texts
from training.job import TrainJob

tones = load_beside(__file__, "../training/tones.py")
emulation = load_beside(__file__, "../training/emulated_gpu.py")
LSTM = {"kind": "lstm", "dim": 8}
SHORT = {"epochs": 2, "device": "cpu", "threads": 1, "checkpoint_steps": 1, "membership": {"beat_s": 0.05}}
WORDS = ("a", "b", "c", "d")
SPEC = LmSpec(network=LstmConfig(dim=12, dropout=0.0), words=(*SPECIAL, *WORDS))


def sentences(count, seed):
    """Each word but the first is the one after the word before it, in a circle; lengths are 2 to 5."""
    chosen = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        first, length = chosen.integers(4), chosen.integers(2, 6)
        drawn.append(np.array([START_ID, *((first + np.arange(length)) % 4 + len(SPECIAL)), END_ID]))
    return drawn


@pytest.fixture
def job(tmp_path):
    """Makes jobs; `changes` go to the training's configuration."""

    def build(**changes):
        for name, count, seed in (("train", 200, 1), ("valid", 40, 2)):
            write_text(ObjectStore(str(tmp_path / name)), sentences(count, seed), 200)
        options = {"device": "cpu", "threads": 1, "log_steps": 1, "batch_seconds": 60, "epochs": 6}
        options |= {"membership": {"beat_s": 0.05}, "optimizer": {"lr": 0.02}}
        return TrainJob(
            run="lm",
            seed=1,
            train=LmTrainConfig.model_validate(options | changes).engine_part(),
            task=LanguageModelTaskConfig(
                spec=SPEC, train_url=str(tmp_path / "train"), valid_url=str(tmp_path / "valid")
            ),
            output_url=str(tmp_path / "output"),
            journal=tmp_path / "journal.jsonl",
            cache=tmp_path / "cache",
        )

    return build


def best_loss():
    """Entropy in nats a word, ends included: four first words, and four lengths, which are 3.5 words on average."""
    return 2 * math.log(4) / 4.5


def test_job_survives_a_round_trip(job):
    described = job()
    again = TrainJob.model_validate_json(described.model_dump_json())
    assert again.task == described.task
    assert isinstance(again.task, LanguageModelTaskConfig)
    assert isinstance(again.task.spec.network, LstmConfig)
    assert again.train.model_dump() == described.train.model_dump()


def test_engine_learns_a_toy_language(job):
    done = tones.train_here(job())
    loss = done.result["valid"]["loss"]
    assert best_loss() < loss < 1.25 * best_loss()
    assert "wer" not in done.result["valid"]
    model = read_network(done.bundle / "lm.safetensors")
    assert tuple(model.words) == SPEC.words
    assert done.result["parameters"] == model.num_parameters
    perplexity = model.evaluate([model.words[int(word)] for word in sentence[1:-1]] for sentence in sentences(40, 2))
    assert math.log(perplexity.with_unknown) == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [{"nodes": 2, "strategy": "adpsgd"}, {"learners_per_node": 2, "strategy": "scpsgd"}]
)
def test_several_learners_train_one_model(job, strategy):
    done = tones.train(job(**strategy))
    assert done.result["valid"]["loss"] < 1.4 * best_loss()
    assert done.result["strategy"] == strategy["strategy"]


def test_sentences_of_a_block_are_independent():
    torch.manual_seed(0)
    network = SPEC.build_model().eval()
    blocks = sentences(5, 3)
    whole = torch.from_numpy(np.concatenate(blocks)).float()[None, :, None]
    together, lengths = network(whole, torch.tensor([whole.shape[1]]))
    assert lengths.tolist() == [whole.shape[1]]
    alone = [
        network(torch.from_numpy(block).float()[None, :, None], torch.tensor([len(block)]))[0][0] for block in blocks
    ]
    torch.testing.assert_close(together[0], torch.cat(alone))
    assert together[0, :, START_ID].max() == -torch.inf


def test_shards_contain_every_sentence_once_and_whole(tmp_path):
    store, blocks = ObjectStore(str(tmp_path)), [np.concatenate(sentences(30, n)) for n in range(3)]
    blocks.append(np.concatenate([[START_ID], np.full(400, 5), [END_ID]]))
    index = write_text(store, blocks, 300)
    assert len(index.shards) > 1
    assert sum(index.column("duration")) == sum(map(len, blocks))
    assert max(index.column("num_frames")) == 402
    assert [row for row in index.column("num_frames") if row > 256] == [402]
    written = {shard.name: (tmp_path / shard.name).stat().st_mtime_ns for shard in index.shards}
    (tmp_path / "index.parquet").unlink()
    (tmp_path / index.shards[0].name).unlink()
    again = write_text(store, blocks, 300)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in ShardIndex.read(store).shards]
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in index.shards]
    kept = {shard.name for shard in again.shards if (tmp_path / shard.name).stat().st_mtime_ns == written[shard.name]}
    assert kept == written.keys() - {index.shards[0].name}, "a resume writes what is missing"


# --- the stage


@pytest.fixture
def continued(finished, tmp_path, monkeypatch):
    """Makes runs that continue from the finished run's training, in a separate data folder."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))

    def variant(lm=LSTM, train=SHORT, **fields):
        run = Run(parse_config(tiny_document(lm=lm, lm_train=train, **fields)), "r")
        names = STAGES[: STAGES.index("train") + 1]
        run.results = {name: result for name, result in finished.results.items() if name in names}
        return run

    return variant


@pytest.mark.slow
def test_stage_trains_a_network_and_keeps_only_its_model(continued):
    run = continued()
    result = LM.execute(run)
    folder, about = result.store.local_path("done.json").parent, result.record["lm"]
    model = read_network(folder / "lm.safetensors")
    assert result.counts == {
        "sentences": 24,
        "words": len(model.words) - len(SPECIAL),
        "parameters": model.num_parameters,
    }
    assert set(result.record["bytes"]) == {"lm.safetensors", "words.txt"}
    assert {"text", "training"}.isdisjoint(path.name for path in folder.iterdir())
    expected = model.evaluate(line.split() for line in set_texts(run, "valid"))
    assert about["perplexity"]["valid"]["perplexity_with_unknown"] == pytest.approx(expected.with_unknown)
    assert about["training"]["valid_loss"] == pytest.approx(math.log(expected.with_unknown), abs=1e-4)
    assert (about["training"]["epoch"], about["training"]["strategy"]) == (2, "single")
    assert figures(result.record)["lm.parameters"] == model.num_parameters
    assert LM.execute(continued()).cached


_KILLED = """
import sys
from pathlib import Path
from tasks.config.pipeline import load_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run

run_plainly(Run(load_config(Path(sys.argv[1])), "killed"), "lm")
"""


@pytest.mark.slow
def test_killed_training_continues_at_its_checkpoint(continued, tmp_path):
    long = SHORT | {"epochs": 400, "average": 1}
    run, config = continued(train=long), tmp_path / "tiny.yaml"
    config.write_text(json.dumps(tiny_document(lm=LSTM, lm_train=long)))
    store = LM.output(run).store
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(config)], cwd=ROOT)
    try:
        wait_until(lambda: store.list("training/checkpoints"), 120)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert LM.output(run).record() is None
    shards = store.local_path("text/train/index.parquet")
    written = shards.stat().st_mtime_ns
    journal = tmp_path / "home" / "work" / f"lm-train-{LM.output(run).key}" / "journal.jsonl"
    before = journal.stat().st_size
    again = continued(train=long)
    kept = []
    from tasks.stages import lm_network

    original = lm_network.run_training

    def watched(job, *rest):
        kept.append(shards.stat().st_mtime_ns)
        original(job, *rest)

    lm_network.run_training = watched
    try:
        result = LM.execute(again)
    finally:
        lm_network.run_training = original
    assert kept == [written]
    assert journal.stat().st_size > before
    starts = [json.loads(line) for line in journal.read_text().splitlines()]
    assert any(entry["kind"] == "resume" for entry in starts), {entry["kind"] for entry in starts}
    assert result.record["lm"]["training"]["epoch"] == 400


def test_address_depends_on_what_affects_the_network(continued):
    def key(*options, **fields):
        return LM.output(continued(*options, **fields)).key

    first = key()
    assert key(LSTM, SHORT | {"threads": 2, "log_steps": 3}) == first
    assert key(LSTM, {"epochs": 2}) != key(LSTM, {"epochs": 3})
    assert key(LSTM, {"epochs": 10}) == key(LSTM, None)
    others = [key(LSTM | {"dim": 9}), key(LSTM, SHORT | {"epochs": 3}), key(seed=2), key({"order": 2}, None)]
    assert len({first, *others}) == 5


def test_address_of_n_gram_model_ignores_the_seed(continued):
    lm = {"order": 2, "smoothing": "witten-bell"}
    assert LM.output(continued(lm, None, seed=2)).key == LM.output(continued(lm, None)).key


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lm": {}, "lm_train": {}}, "lm.kind is ngram: remove lm_train"),
        ({"lm_train": {}}, "lm.kind is none: remove lm_train"),
        ({"lm": LSTM, "lm_train": {"objective": "ctc"}}, "lm_train.objective: there is no such field"),
        ({"lm": LSTM, "lm_train": {"augment": {"time_masks": 1}}}, "lm_train.augment: there is no such field"),
        ({"lm": LSTM, "lm_train": {"launch": {"kind": "external"}}}, "trained on one machine: use local"),
        (
            {"lm": LSTM, "lm_train": {"strategy": "pipeline", "learners_per_node": 2}},
            "pipeline splits acoustic models",
        ),
        ({"train": {"objective": "next_word"}}, "next_word"),
        ({"lm": LSTM, "decode": {"kind": "words"}}, "lm.kind lstm makes none: use lm.kind ngram"),
    ],
)
def test_impossible_trainings_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(tiny_document(**fields))


def test_training_without_held_out_text_is_refused(continued, monkeypatch):
    monkeypatch.setattr("tasks.stages.lm_network.set_texts", lambda run, name: iter(()))
    with pytest.raises(StageError, match=r"there is no transcript in it: raise data\.valid_share"):
        LM.execute(continued())


def test_more_nodes_than_shards_are_refused(continued):
    with pytest.raises(StageError, match=r"lm_train\.nodes is 16, but the text .* use fewer nodes, or add text"):
        LM.execute(continued(train=SHORT | {"nodes": 16, "strategy": "adpsgd"}))


def test_file_without_a_network_is_an_error_with_a_remedy(tmp_path):
    path = tmp_path / "lm.safetensors"
    for content in (b"", b"no tensors at all"):
        path.write_bytes(content)
        with pytest.raises(LmError, match=r"lm\.safetensors cannot be read as a language model.*make it again"):
            read_network(path)
    SPEC.save(tmp_path, {"weight": torch.zeros(1)})
    with pytest.raises(LmError, match="cannot be read as a language model"):
        read_network(path)
    with pytest.raises(LmError, match="cannot be read as a language model"):
        read_network(tmp_path / "none")


def test_a_step_waits_for_a_gpu_at_its_end_only(job, monkeypatch):
    plain, there = (emulation.node_of_one(job(), torch.device("cpu")) for _ in range(2))
    wanted = emulation.steps(*plain)
    emulation.move_to_gpu(there[0])
    with emulation.emulated_gpu(monkeypatch) as gpu:
        tensors = emulation.steps(*there, gpu.noting_afresh)
    assert not gpu.waits
    assert gpu.expected == ["tolist in transfers.py: read_back"]
    for tensor, other in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(tensor.as_subclass(torch.Tensor), other, rtol=1e-4, atol=1e-5)
