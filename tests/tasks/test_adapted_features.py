"""Features that are adapted to speakers: stored for training, made from audio in recognition, and in a bundle."""

import io
import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from support import environment, load_beside, tiny_document
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.simulate import training_job
from recognition.adaptation import SpeakerAdapter, add_adaptation
from recognition.bundle import BundleError, check_files, save_bundle
from recognition.recognizer import Recognizer
from recognition.transcriber import Transcriber
from speech.alignments import AlignmentTable
from speech.audio import decode_audio
from speech.features import CmvnStats, FeatureError
from speech.hmm.decode import MINIMUM_FRAMES, decode_plain
from speech.hmm.model import HmmModel
from speech.vad import DETECTORS
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages import adapt, decode
from tasks.stages.adapt import ADAPT
from tasks.stages.base import Run, Stage
from tasks.stages.bundles import adaptation_source, complete_bundle, fetch_bundle
from tasks.stages.decode import DECODE, decode_with
from tasks.stages.decoder_files import decoder_of
from tasks.stages.feature_shards import compute_features
from tasks.stages.features import FEATURES
from tasks.stages.graph import GRAPH
from tasks.stages.run_sets import set_digest, set_url, train_stats
from tasks.stages.train import TRAIN, make_job, model_digest

aligning = load_beside(__file__, "aligning.py")
kills = load_beside(__file__, "kill_stage.py")
DIM = aligning.SIZES["lda_dim"]


def document(arpa, **fields):
    """A hybrid pipeline on adapted features; its alignment is that of `aligned_speech`."""
    adapted = {
        "features": {"kind": "fmllr", "dim": DIM},
        "align": aligning.SIZES | {"stage": "sat"},
        "model": {"kind": "tdnn", "dim": 32, "bottleneck": 8, "layers": 2, "subsampling": 1},
        "decode": {"kind": "graph", "lm": str(arpa)},
        "train": {"objective": "frame_cross_entropy", "device": "cpu", "augment": {"enabled": False}},
    }
    return tiny_document(**(adapted | fields))


def publish_untrained_network(run, output):
    """Publish a network with large random weights, whose hypotheses depend on every frame."""
    spec = make_job(run, output).task.spec
    torch.manual_seed(3)
    weights = {name: value.contiguous() * 3 for name, value in spec.build_model().state_dict().items()}
    folder = output.store.local_path("model/bundle.json").parent
    save_bundle(folder, spec, weights)
    return {"counts": {}, "digest": model_digest(output.store)}


@pytest.fixture(scope="module")
def home():
    home = aligning.aligned_speech()[0]
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        yield home


def adapted_run(home, **fields):
    """A run with adapted features."""
    _, aligned, _ = aligning.aligned_speech()
    words = sorted({word for text in aligning.run_texts(aligned) for word in text.split()})
    (home / "lm.arpa").write_text(aligning.unigrams(words))
    run = Run(parse_config(document(home / "lm.arpa", **fields)), "adapted")
    run.results |= {name: aligned.results[name] for name in ("prepare", "shard", "align")}
    for stage in (FEATURES, ADAPT):
        stage.execute(run)
    return run


@pytest.fixture(scope="module")
def run(home):
    """A run whose network, which was not trained, has decoded the test set."""
    return decoded_untrained(adapted_run(home))


def decoded_untrained(run):
    """A run with adapted features, after its network, which was not trained, has decoded the test set."""
    made = Stage(
        "train", 1, lambda run: ({"made": "up"}, {"adapt": run.result("adapt").key}), publish_untrained_network
    )
    for stage in (made, GRAPH, DECODE):
        stage.execute(run)
    return run


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    return complete_bundle(run, tmp_path_factory.mktemp("bundle"))


def loaded(run, folder):
    """The GMM-HMM and the transforms of a run."""
    output = run.result("align").output
    for name in ("model/model.json", "model/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(output.read(name))
    return HmmModel.load(folder / "model"), load_file(output.fetch("speakers.safetensors", folder))


def audio_of(run, name="test"):
    """Rows of a set's index, and the waveforms."""
    store = ObjectStore(run.result("shard").store.child(name).url)
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    return [index.row(i) for i in range(len(index))], [decode_audio(reader.payload(i))[0] for i in range(len(index))]


def failing_on_call(error):
    def called(*_, **__):
        raise error

    return called


def test_stored_features_are_gmm_features_with_speaker_transforms(run, tmp_path):
    model, transforms = loaded(run, tmp_path)
    static, _ = compute_features(run, run.config.align.features, "valid", ObjectStore(str(tmp_path / "v")), "align")
    store = ObjectStore(set_url(run, "valid"))
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    assert index.digest == set_digest(run, "valid")
    lengths = {}
    for row in range(len(index)):
        about = index.row(row)
        feats = np.load(io.BytesIO(reader.payload(row)))
        plain = static.read(row, about["speaker"])
        assert index.column("id")[row] == static.index.column("id")[row]
        expected = model.chain(plain, transforms[f"valid/{about['speaker']}"])
        np.testing.assert_allclose(feats, expected, rtol=1e-5, atol=1e-4)
        assert not np.allclose(feats, model.chain(plain), atol=0.1)
        assert feats.dtype == np.float32
        lengths[about["id"]] = len(feats)
    path = run.result("align").store.local_path("alignments/valid.parquet")
    table = AlignmentTable.read(path)
    assert {utterance: len(table.pdfs(utterance)) for utterance in table} == {
        utterance: lengths[utterance] for utterance in table
    }


def test_statistics_are_computed_over_the_stored_training_set(run):
    store = ObjectStore(set_url(run, "train"))
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    everything = np.concatenate([np.load(io.BytesIO(reader.payload(i))) for i in range(len(index))])
    stats = CmvnStats.from_dict(train_stats(run))
    assert stats.count == len(everything)
    np.testing.assert_allclose(stats.mean, everything.mean(0), atol=1e-4)
    np.testing.assert_allclose(stats.std, everything.std(0), rtol=1e-4)
    assert run.result("adapt").counts["dimensions"] == DIM
    assert run.result("features").counts == {"frames": 0, "dimensions": DIM}
    none = adapted_run(aligning.aligned_speech()[0], features={"kind": "fmllr", "dim": DIM, "cmvn": "none"})
    assert train_stats(none) is None
    assert none.result("adapt").cached


def test_interrupted_adaptation_keeps_its_shards(run, monkeypatch):
    again = Run(run.config, "again", force_from="adapt")
    again.results |= {name: run.results[name] for name in ("prepare", "shard", "features", "align")}
    again.config = again.config.model_copy(update={"runner": again.config.runner.model_copy(update={"workers": 1})})
    write, written = adapt.write_shard, []

    def interrupted(store, name, *more, **fields):
        written.append(f"{store.url}/{name}")
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(store, name, *more, **fields)

    monkeypatch.setattr(adapt, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ADAPT.execute(again)
    again.force_from = ""
    record = ADAPT.execute(again).record
    first, second, *rest = written
    assert second in rest
    assert first not in rest
    assert record["sets"] == run.result("adapt").record["sets"]
    assert record["stats"] == run.result("adapt").record["stats"]
    assert not [name for name in ADAPT.output(run).store.list() if name.startswith("work")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_killed_adaptation_continues_after_its_last_shard(run, home, kind):
    again = adapted_run(home, runner={"kind": kind, "workers": 1})
    output = ADAPT.output(again)
    output.clear()
    kills.killed_in(home, again.config.model_dump(mode="json", by_alias=True), "adapt", "^train$")
    path = output.store.local_path("train/shard-000000.tar")
    before = path.stat().st_mtime_ns
    assert output.record() is None
    record = ADAPT.execute(again).record
    assert path.stat().st_mtime_ns == before
    assert {name: entry["digest"] for name, entry in record["sets"].items()} == {
        name: entry["digest"] for name, entry in run.result("adapt").record["sets"].items()
    }


def test_training_key_depends_on_features_and_decoding_key_on_search(run, home):
    assert set_url(run, "test", recognition=True) == run.result("shard").store.child("test").url
    key, decoded = TRAIN.output(run).key, DECODE.output(run).key
    searched = Run(run.config, "searched")
    searched.results |= run.results
    align = run.config.align
    search = align.recognize.model_copy(update={"passes": 1})
    searched.config = run.config.model_copy(update={"align": align.model_copy(update={"recognize": search})})
    assert TRAIN.output(searched).key == key
    assert DECODE.output(searched).key != decoded
    searched.results["adapt"] = run.result("adapt")
    record = run.result("adapt").record
    changed = record | {"sets": record["sets"] | {"train": {"digest": "other"}}}
    searched.results["adapt"] = type(run.result("adapt"))(**(run.result("adapt").to_dict() | {"record": changed}))
    assert TRAIN.output(searched).key != key


def test_all_test_utterances_are_decoded_without_repeating_finished_speakers(run, monkeypatch):
    rows = read_table(run.result("decode").store, "test.parquet")
    index = ShardIndex.read(run.result("shard").store.child("test"))
    assert [row["id"] for row in rows] == list(index.column("id"))
    assert len({row["hyp"] for row in rows}) > 6
    assert not [name for name in run.result("decode").store.list() if name.startswith("work")]
    again = Run(run.config, "again", force_from="decode")
    again.results |= {name: result for name, result in run.results.items() if name != "decode"}
    with monkeypatch.context() as patch:
        patch.setattr(decode, "publish_hypotheses", failing_on_call(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            DECODE.execute(again)
    again.force_from = ""
    DECODE.output(run).withdraw()
    monkeypatch.setattr(decode, "decode_set", failing_on_call(AssertionError))
    DECODE.execute(again)
    assert read_table(again.result("decode").store, "test.parquet") == rows


def test_bundle_decodes_like_the_stage(run, bundle, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(bundle, elsewhere)
    expected = {row["id"]: row["hyp"] for row in read_table(run.result("decode").store, "test.parquet")}
    recognizer = Recognizer.load(elsewhere)
    decoded = decode_with(run, elsewhere, "test", recognizer.decoder.cfg, own=False)
    assert {hypothesis.id: hypothesis.hyp for hypothesis in decoded} == expected
    about, waves = audio_of(run)
    transcriber = Transcriber(elsewhere, vad=DETECTORS["none"](), batch_seconds=2.0)
    order = np.random.default_rng(1).permutation(len(waves)).tolist()  # speakers take turns
    speakers = [about[i]["speaker"] for i in order]
    said = transcriber.transcribe([waves[i].numpy() for i in order], 8000, speakers=speakers, words=True)
    assert {about[i]["id"]: transcript.text for i, transcript in zip(order, said, strict=True)} == expected
    alone = transcriber.transcribe([wave.numpy() for wave in waves], 8000)
    assert {row["id"]: transcript.text for row, transcript in zip(about, alone, strict=True)} != expected
    with pytest.raises(ValueError, match="2 recordings, but 1 speakers"):
        transcriber.transcribe([waves[0].numpy()] * 2, 8000, speakers=["a"])


def test_command_line_adapts_to_all_recordings_of_a_speaker(run, bundle, tmp_path):
    about, waves = (values[::2] for values in audio_of(run))
    files = [tmp_path / "audio" / row["speaker"] / f"{row['id']}.wav" for row in about]
    for file, wave in zip(files, waves, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, wave.numpy(), 8000, subtype="FLOAT")
    files.sort()
    transcriber = Transcriber(bundle, vad=DETECTORS["none"]())
    names = {"file": [str(file) for file in files], "folder": [file.parent.name for file in files]}
    shown = {}
    for kind in ("file", "folder", "one"):
        words = ["transcribe", str(tmp_path / "audio"), "-m", str(bundle), "--vad", "none", "--speakers", kind]
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        shown[kind] = [transcript["text"] for transcript in json.loads(result.stdout)["files"]]
        speakers = names.get(kind, ["x"] * len(files))
        assert shown[kind] == [transcript.text for transcript in transcriber.transcribe(files, speakers=speakers)]
    assert len({tuple(texts) for texts in shown.values()}) == 3


def test_adaptation_raises_the_likelihood_of_new_speakers(run, bundle):
    recognizer = Recognizer.load(bundle)
    model, about, waves = recognizer._hmm, *audio_of(run)
    adapter = SpeakerAdapter(model, recognizer.spec.adaptation, 8000, recognizer.decoder.search, run.config.features)
    assert (adapter._search.options.beam, adapter._search.options.max_active) == (10.0, 2000)
    for speaker in {row["speaker"] for row in about}:
        own = [wave for row, wave in zip(about, waves, strict=True) if row["speaker"] == speaker]
        static = adapter.static(own)
        transform = adapter.transform(static)
        plain, adapted = torch.cat([model.chain(feats) for feats in static]), torch.cat(adapter(own))
        assert len(plain) > MINIMUM_FRAMES
        assert float(torch.cat(static).mean(0).abs().max()) < 1e-3
        pdfs = np.concatenate([path.pdfs for path in decode_plain(model, adapter._search, static, transform)])
        chosen = torch.arange(len(plain)), torch.from_numpy(pdfs.astype(np.int64))
        likelihoods = [model.gmm.log_likelihoods(frames)[chosen].mean() for frames in (plain, adapted)]
        assert likelihoods[1] + torch.linalg.slogdet(transform[:, :-1])[1] > likelihoods[0] + 0.1


def test_short_recordings_are_not_adapted(run, bundle):
    recognizer = Recognizer.load(bundle)
    _, waves = audio_of(run)
    adapter = recognizer._adapter
    short = waves[:2]
    expected = [recognizer._hmm.chain(feats) for feats in adapter.static(short)]
    assert 0 < sum(map(len, expected)) < MINIMUM_FRAMES
    assert all(torch.equal(*pair) for pair in zip(recognizer.adapted(short), expected, strict=True))
    nothing = recognizer.adapted([torch.zeros(10), torch.zeros(0)])
    assert [tuple(feats.shape) for feats in nothing] == [(0, DIM)] * 2


def test_bundle_needs_its_own_gmm(run, bundle, tmp_path):
    assert {"hmm/model.json", "hmm/model.safetensors"} < set(check_files(bundle))
    bare = fetch_bundle(run.result("train").output, tmp_path / "bare")
    with pytest.raises(BundleError, match="features of kind fmllr, but not the GMM-HMM"):
        Recognizer.load(bare, decoder_of(run))
    model, _ = loaded(run, tmp_path)
    replace(model, gmm=model.gmm.transformed(torch.eye(DIM) * 1.1)).save(tmp_path / "other")
    cfg = Recognizer.load(bundle).spec.adaptation
    with pytest.raises(BundleError, match="not the GMM-HMM that .*bare was trained with"):
        add_adaptation(bare, tmp_path / "other", cfg)
    shutil.copytree(bundle, tmp_path / "damaged")
    (tmp_path / "damaged" / "hmm" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"hmm/model\.safetensors is damaged"):
        Recognizer.load(tmp_path / "damaged")


def test_adapted_features_of_a_waveform_alone_are_refused(bundle):
    recognizer = Recognizer.load(bundle)
    with pytest.raises(FeatureError, match="all speech of a speaker"):
        recognizer.encode(torch.zeros(1, 4000), torch.tensor([4000]))


def test_results_of_damaged_shards_are_not_cached(tmp_path, monkeypatch):
    piece = dict.fromkeys(("bundle", "decode", "files", "device", "speakers"))
    piece |= {"work": str(tmp_path), "url": "", "result": "a.json", "rows": [0, 1]}
    calls = []

    def work(recognizer, dataset, *, rows, on_damage):
        calls.append(rows)
        if len(calls) == 1:
            on_damage(SimpleNamespace(damage=("shard-0.tar", "torn")))
        return {1: SimpleNamespace(hyp="a b", score=-2.0, confidence=0.5)}

    monkeypatch.setattr(decode, "_loaded", lambda description: SimpleNamespace(spec=SimpleNamespace(sample_rate=1)))
    monkeypatch.setattr(decode, "open_set", lambda *_: None)
    monkeypatch.setattr(decode, "decode_set", work)
    damaged, whole, kept = (decode.decode_piece(piece) for _ in range(3))
    assert damaged["damaged"] == [["shard-0.tar", "torn"]]
    assert whole == kept == {"rows": [[1, ["a b", -2.0, 0.5]]], "damaged": []}
    assert calls == [[0, 1]] * 2


def test_models_with_other_features_have_no_adaptation(home):
    run = Run(parse_config(tiny_document()), "r")
    assert adaptation_source(run) is None


def test_segments_of_adapted_features_are_simulated(home, run, tmp_path):
    config = tmp_path / "hybrid.yaml"
    config.write_text(json.dumps(document(home / "lm.arpa")), encoding="utf-8")
    stored = sorted(path for path in (home / "objects").rglob("*") if "uses" not in path.parts)
    job = training_job(config, ["train.segments={frames: 7}"])
    own, whole = ShardIndex.read(ObjectStore(job.task.train_url)), ShardIndex.read(ObjectStore(job.task.valid_url))
    utterances = ShardIndex.read(ObjectStore(set_url(run, "train"))).column("id")
    assert {name.split("@")[0] for name in own.column("id")} == set(utterances)
    assert len(own) > 3 * len(utterances)
    assert not any("@" in name for name in whole.column("id"))
    words = ["simulate", str(config), "--set", "train.segments={frames: 7}", "--strategy", "adpsgd", "--epochs", "1"]
    shown = CliRunner().invoke(app, [*words, "--learners", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    (row,) = json.loads(shown.stdout.splitlines()[-1])["rows"]
    assert (row["strategy"], row["wer"]) == ("adpsgd", None)
    assert 0 < row["loss"] < 2 * math.log(len(job.task.spec.states.log_priors))
    assert sorted(path for path in (home / "objects").rglob("*") if "uses" not in path.parts) == stored
