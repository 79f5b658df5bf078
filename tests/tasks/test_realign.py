"""The stage realign: alignments by a network take the place of the GMM-HMM's in training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import environment, load_beside

from recognition.alignment import StateAligner
from recognition.bundle import add_decoder, load_spec, save_bundle
from recognition.data.state_targets import read_alignments
from speech.alignments import AlignmentTable
from speech.decoding.words import WordsConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError
from tasks.config.pipeline import ConfigError, parse_config
from tasks.config.realign import RealignConfig
from tasks.stages import realign
from tasks.stages.base import StageError, stages_of
from tasks.stages.realign import REALIGN, moved_share
from tasks.stages.run_sets import set_url
from tasks.stages.train import TRAIN, make_job

adapted = load_beside(__file__, "test_adapted_features.py")
home = adapted.home


@pytest.fixture(scope="module")
def plain(home):
    """A run up to training, without realignment."""
    return adapted.adapted_run(home)


@pytest.fixture(scope="module")
def bundle(plain, tmp_path_factory):
    """A network of the alignments' states, with large random weights."""
    folder = tmp_path_factory.mktemp("network")
    spec = make_job(plain, TRAIN.output(plain)).task.spec
    torch.manual_seed(4)
    weights = {name: value.contiguous() * 3 for name, value in spec.build_model().state_dict().items()}
    save_bundle(folder, spec, weights)
    return folder


def realigning(plain, bundle, **fields):
    """The run with a section realign."""
    section = RealignConfig(model=str(bundle), **fields)
    run = replace(plain, config=plain.config.model_copy(update={"realign": section}), results=dict(plain.results))
    assert stages_of(run.config).index("realign") == stages_of(run.config).index("train") - 1
    return run


def tables(run, stage):
    return {name: read_alignments(run.result(stage).store.child("alignments"), name) for name in ("train", "valid")}


@pytest.fixture(scope="module")
def realigned(plain, bundle):
    run = realigning(plain, bundle)
    REALIGN.execute(run)
    return run


def likelihoods_from_states(run, monkeypatch, change):
    """The network's likelihoods become those of known states: `change` of what the GMM-HMM has aligned."""
    known = tables(run, "align")
    pdfs = {name: change(table.pdfs(name)) for table in known.values() for name in table}
    size = known["train"].info.num_pdfs

    def outputs(self, batch):
        return [50.0 * np.eye(size, dtype=np.float32)[pdfs[name]] for name in batch.ids if name in pdfs] + [
            np.zeros((int(count), size), np.float32)
            for name, count in zip(batch.ids, batch.lengths, strict=True)
            if name not in pdfs
        ]

    monkeypatch.setattr(StateAligner, "outputs", outputs)


def test_network_that_agrees_with_the_gmm_changes_nothing(plain, bundle, monkeypatch):
    likelihoods_from_states(plain, monkeypatch, lambda states: states)
    run = realigning(plain, bundle, acoustic_scale=1.0)
    counts = REALIGN.execute(run).counts
    before, after = tables(run, "align"), tables(run, "realign")
    assert {name: table.digest for name, table in after.items()} == {name: t.digest for name, t in before.items()}
    assert counts == {"aligned": sum(map(len, before.values())), "failed": 0}
    for name, figures in run.result("realign").record["sets"].items():
        assert (figures["moved"], figures["digest"]) == (0.0, before[name].digest)
        for utterance in before[name]:
            old, new = before[name].alignment(utterance), after[name].alignment(utterance)
            assert old.words == new.words
            assert [phone.label for phone in old.units] == [phone.label for phone in new.units]


def test_training_uses_the_networks_alignments(realigned, plain):
    before, after = tables(realigned, "align"), tables(realigned, "realign")
    assert set(after["train"]) <= set(ShardIndex.read(ObjectStore(set_url(plain, "train"))).column("id"))
    assert len(after["train"]) == len(before["train"])
    assert 0.1 < realigned.result("realign").record["sets"]["train"]["moved"] <= 1.0
    for name in after["train"]:
        old, new = before["train"].alignment(name), after["train"].alignment(name)
        assert [word.label for word in new.words] == [word.label for word in old.words]
        assert len(new.pdfs) == len(old.pdfs) == new.units[-1].end
    key = TRAIN.output(realigned).key
    assert key != TRAIN.output(plain).key
    job = make_job(realigned, TRAIN.output(realigned))
    assert job.task.alignments_url == realigned.result("realign").store.child("alignments").url
    assert job.task.spec.states.log_priors != make_job(plain, TRAIN.output(plain)).task.spec.states.log_priors
    assert job.task.spec.states.model == before["train"].info.model
    figures = realigned.result("realign").record
    assert not figures["counts"]["failed"]
    assert not ObjectStore(realigned.result("realign").url).list("work")


def test_key_depends_on_the_network_not_its_path(realigned, bundle, plain, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("bundle.json", "model.safetensors"):
        (copy / name).write_bytes((bundle / name).read_bytes())
    spec = load_spec(copy).model_copy(update={"provenance": {"name": "registered"}})
    save_bundle(copy, spec, torch_weights(copy))
    (tmp_path / "some.txt").write_text("one\n")  # decoders of registered models have files
    add_decoder(copy, WordsConfig(words=str(tmp_path / "some.txt")))
    assert load_spec(copy).decode.kind == "words"
    assert REALIGN.output(realigning(plain, copy)).key == realigned.result("realign").key
    again, sets = realigning(plain, copy, retry_beam=81.0), realigned.result("realign").record["sets"]
    assert REALIGN.execute(again).record["sets"]["train"]["digest"] == sets["train"]["digest"]
    assert REALIGN.output(realigning(plain, copy, beam=19.0)).key != realigned.result("realign").key
    weights = {name: value * 2 for name, value in torch_weights(copy).items()}
    save_bundle(copy, load_spec(copy), weights)
    realign._fetched.cache_clear()
    assert REALIGN.output(realigning(plain, copy)).key != realigned.result("realign").key


def torch_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_killed_stage_keeps_finished_pieces(plain, bundle, monkeypatch, realigned):
    run = realigning(plain, bundle, acoustic_scale=0.31)
    aligned, real = [], realign.align_set

    def failing(network, dataset, rows, **options):
        if aligned:
            raise KeyboardInterrupt
        aligned.append(list(rows))
        return real(network, dataset, rows, **options)

    one_worker = plain.config.runner.model_copy(update={"workers": 1})
    run = replace(run, config=run.config.model_copy(update={"runner": one_worker}))
    with monkeypatch.context() as patch:
        patch.setattr(realign, "share_out", lambda count, runner: iter([[n] for n in range(count)]))
        patch.setattr(realign, "align_set", failing)
        with pytest.raises(KeyboardInterrupt):
            REALIGN.execute(run)
        first, aligned[:] = aligned[0], []
        patch.setattr(realign, "align_set", lambda *args, **options: aligned.append(args[2]) or real(*args, **options))
        REALIGN.execute(run)
    assert first not in aligned
    assert sorted(tables(run, "realign")["train"]) == sorted(tables(realigned, "realign")["train"])


def test_utterances_that_fail_and_damaged_shards_are_counted(plain, bundle, monkeypatch):
    real, shards = realign.align_set, ShardIndex.read(ObjectStore(set_url(plain, "train"))).shards
    lost = shards[0]

    def failing(network, dataset, rows, on_damage):
        if dataset.index.shards == shards and 0 in dataset.index.column("shard")[rows[0] : rows[0] + 1]:
            on_damage(ShardError("cut short", lost, "cut short"))
            return
        for number, (row, utterance) in enumerate(real(network, dataset, rows, on_damage=on_damage)):
            yield row, utterance if number else replace(utterance, alignment=None, failure="no path")

    monkeypatch.setattr(realign, "share_out", lambda count, runner: iter([[n] for n in range(count)]))
    monkeypatch.setattr(realign, "align_set", failing)
    run = realigning(plain, bundle, acoustic_scale=0.32)
    data = run.config.data.model_copy(update={"max_quarantined": 0.9})
    run = replace(run, config=run.config.model_copy(update={"data": data}))
    record = REALIGN.execute(run).record
    failed = record["sets"]["train"]["failures"]
    assert len(failed) == len(shards) - 1 > 0
    assert set(failed.values()) == {"no path"}
    assert record["counts"]["failed"] == len(failed) + len(record["sets"]["valid"]["failures"])
    assert len(tables(run, "realign")["train"]) + len(failed) + lost.count == sum(shard.count for shard in shards)
    assert not set(failed) & set(tables(run, "realign")["train"])
    assert record["counts"]["quarantined"] == lost.count
    assert record["quarantined_shards"][0]["shard"] == lost.name


def test_share_of_changed_frames_is_reported(plain):
    table = tables(plain, "align")["valid"]
    assert moved_share(table, table) == 0.0
    names = list(table)
    rows = table._table.to_pydict()
    rows["pdfs"] = [[state + (place == 0) for state in pdfs] for place, pdfs in enumerate(rows["pdfs"])]
    import pyarrow as pa

    changed = AlignmentTable(table.info, pa.table(rows, schema=table._table.schema))
    frames = [len(table.pdfs(name)) for name in names]
    assert moved_share(table, changed) == pytest.approx(frames[0] / sum(frames))


def test_networks_without_these_states_are_refused(plain, bundle, tmp_path, finished):
    with pytest.raises(StageError, match=r"realign.model: .*nothing is no bundle's folder: give one, or models:/"):
        REALIGN.output(realigning(plain, tmp_path / "nothing"))
    spec = load_spec(bundle)
    other = spec.model_copy(update={"states": spec.states.model_copy(update={"model": "ab" * 32})})
    for name, wrong in (("other", other), ("tokens", finished_spec(finished, tmp_path))):
        save_bundle(tmp_path / name, wrong, wrong.build_model().state_dict())
        with pytest.raises(StageError, match="realign.model does not have the states of this section align"):
            REALIGN.execute(realigning(plain, tmp_path / name))


def finished_spec(finished, folder):
    """The description in the bundle of a CTC model."""
    from tasks.stages.bundles import fetch_bundle

    with environment(STARLING_HOME=finished.store.local_path("train").parents[1], MLFLOW_TRACKING_URI=None):
        return load_spec(fetch_bundle(finished.result("train").output, folder / "ctc"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"align": None, "features": {"num_mels": 16}},
            "realign changes the alignments of the section align, and there is",
        ),
        (
            {"train": {}, "decode": {}, "features": {"num_mels": 16}},
            "set train.objective to frame_cross_entropy without",
        ),
    ],
)
def test_realign_needs_alignments_that_training_uses(change, message):
    document = adapted.document("lm.arpa") | {"realign": {"model": "models:/m@champion"}, "features": {}} | change
    with pytest.raises(ConfigError, match=message):
        parse_config(document)
