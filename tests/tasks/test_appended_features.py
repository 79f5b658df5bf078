"""Appended features: fMLLR, i-vectors and log-mel side by side, stored for training and recomputed in recognition."""

import io
import shutil

import numpy as np
import pytest
import torch
from support import load_beside

from recognition.adaptation import add_adaptation
from recognition.bundle import IVECTOR_FILE, BundleError, check_files
from recognition.recognizer import Recognizer
from speech.features import CmvnStats, LogMelConfig, build_features
from speech.features.expand import add_deltas
from speech.hmm.ivector import IvectorExtractor, statistics
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages import ivectors, progress
from tasks.stages.adapt import ADAPT
from tasks.stages.base import Run
from tasks.stages.bundles import complete_bundle
from tasks.stages.decode import decode_with
from tasks.stages.decoder_files import decoder_of
from tasks.stages.feature_shards import compute_features
from tasks.stages.ivectors import EXTRACTOR
from tasks.stages.run_sets import set_url, train_stats

adapted = load_beside(__file__, "test_adapted_features.py")
home = adapted.home
configs = load_beside(__file__, "test_adapted_config.py")
DIM, RANK, MELS = adapted.DIM, 4, 15
IVECTORS = slice(DIM, DIM + RANK)
SIZES = {"dim": RANK, "gaussians": 8, "background_iterations": 2, "iterations": 4}


def features(**fields):
    return {
        "kind": "appended",
        "parts": [
            {"kind": "fmllr", "dim": DIM},
            {"kind": "ivector", **SIZES, **fields},
            {"kind": "logmel", "num_mels": MELS, "delta_order": 2},
        ],
    }


@pytest.fixture(scope="module")
def run(home):
    return adapted.adapted_run(home, features=features())


@pytest.fixture(scope="module")
def decoded(run):
    """The run after its network, which was not trained, has decoded the test set."""
    return adapted.decoded_untrained(run)


@pytest.fixture(scope="module")
def bundle(decoded, tmp_path_factory):
    return complete_bundle(decoded, tmp_path_factory.mktemp("bundle"))


def stored(run, name):
    """Features of a set by utterance, and its index."""
    store = ObjectStore(set_url(run, name))
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    frames = [np.load(io.BytesIO(reader.payload(row))) for row in range(len(index))]
    return dict(zip(index.column("id"), frames, strict=True)), index


def plain_frames(run, name, folder):
    """LDA and MLLT frames of a set's utterances, in the order of the index, with their speakers."""
    static, _ = compute_features(run, run.config.align.features, name, ObjectStore(str(folder / name)), "align")
    model, _ = adapted.loaded(run, folder)
    rows = [static.index.row(row) for row in range(len(static.index))]
    return [(row["id"], row["speaker"], model.chain(static.read(n, row["speaker"]))) for n, row in enumerate(rows)]


def test_each_part_equals_the_feature_alone(run, home, tmp_path):
    features, index = stored(run, "valid")
    alone, _ = stored(adapted.adapted_run(home), "valid")
    extract = build_features(LogMelConfig(num_mels=MELS), 8000)
    about, waves = adapted.audio_of(run, "valid")
    assert {row["id"] for row in about} == set(features)
    for row, wave in zip(about, waves, strict=True):
        feats = features[row["id"]]
        assert feats.shape[1] == DIM + RANK + 3 * MELS == run.config.features.width
        np.testing.assert_array_equal(feats[:, :DIM], alone[row["id"]])
        logmel = add_deltas(*extract(wave[None], torch.tensor([len(wave)])))[0]
        np.testing.assert_allclose(feats[:, DIM + RANK :], logmel, rtol=1e-4, atol=1e-4)
    extractor = IvectorExtractor.load(run.result("adapt").store.local_path(EXTRACTOR))
    plain = plain_frames(run, "valid", tmp_path)
    for speaker in set(index.column("speaker")):
        own = torch.cat([frames for _, who, frames in plain if who == speaker])
        expected = extractor.ivector(own)
        for utterance in [name for name, who, _ in plain if who == speaker]:
            np.testing.assert_allclose(
                features[utterance][:, IVECTORS], expected.expand(len(features[utterance]), -1), rtol=1e-4, atol=1e-4
            )
    assert len({tuple(feats[0, IVECTORS]) for feats in features.values()}) == len(set(index.column("speaker")))


def test_extractor_is_estimated_from_training_set_and_metrics_recorded(run, tmp_path):
    record = run.result("adapt").record
    assert record["ivectors"]["gaussians"] == SIZES["gaussians"]
    assert record["counts"]["dimensions"] == DIM + RANK + 3 * MELS
    frames, speakers = (record["ivectors"]["log_likelihoods"][name] for name in ("background", "variability"))
    assert len(speakers) == SIZES["iterations"]
    assert speakers == sorted(speakers)
    assert frames[-1] > frames[1]
    extractor = IvectorExtractor.load(run.result("adapt").store.local_path(EXTRACTOR))
    assert extractor.loadings.shape == (SIZES["gaussians"], DIM, RANK)
    plain = plain_frames(run, "train", tmp_path)
    sums = {}
    for _, speaker, feats in plain:
        stats = statistics(extractor.model, feats)
        sums[speaker] = sums[speaker] + stats if speaker in sums else stats
    before = float(extractor.posterior(type(stats).stack(list(sums.values()))).log_likelihoods.mean())
    assert before >= speakers[-1]
    assert CmvnStats.from_dict(train_stats(run)).dim == run.config.features.width
    assert not [name for name in ADAPT.output(run).store.list() if name.startswith("work")]


@pytest.mark.parametrize("extraction", ["utterance", "online"])
def test_utterance_ivectors_do_not_depend_on_other_utterances(home, extraction, tmp_path):
    run = adapted.adapted_run(home, features=features(extraction=extraction))
    extractor = IvectorExtractor.load(run.result("adapt").store.local_path(EXTRACTOR))
    stored_features, _ = stored(run, "valid")
    for utterance, _, frames in plain_frames(run, "valid", tmp_path)[:3]:
        got = stored_features[utterance][:, IVECTORS]
        for place in (0, 12, len(frames) - 1):
            known = frames if extraction == "utterance" else frames[: place - place % 10 + 1]
            np.testing.assert_allclose(got[place], extractor.ivector(known), rtol=1e-4, atol=1e-4)


def test_interrupted_estimation_repeats_no_finished_step(run, monkeypatch):
    again = Run(run.config, "again", force_from="adapt")
    again.results |= {name: run.results[name] for name in ("prepare", "shard", "features", "align")}
    monkeypatch.setattr(ivectors, "SHARD_FRAMES", 600)
    runner = run.config.runner.model_copy(update={"workers": 1})
    again.config = run.config.model_copy(update={"runner": runner})
    steps, done = dict(ivectors._STEPS), []

    def noted_calls(name, step):
        def called(piece, model):
            if name == "variability" and len([call for call in done if call[0] == name]) == 4:
                raise KeyboardInterrupt
            done.append((name, piece["model"], piece["result"]))
            return step(piece, model)

        return called

    monkeypatch.setattr(ivectors, "_STEPS", {name: noted_calls(name, step) for name, step in steps.items()})
    with pytest.raises(KeyboardInterrupt):
        ADAPT.execute(again)
    first = list(done)
    assert len([call for call in first if call[0] == "statistics"]) > 1  # several groups of speakers
    monkeypatch.setattr(ivectors, "_STEPS", {name: count_calls(name, step, done) for name, step in steps.items()})
    again.force_from = ""
    record = ADAPT.execute(again).record
    assert len(set(done)) == len(done) > len(first)
    expected = run.result("adapt").record["ivectors"]["log_likelihoods"]
    for name, likelihoods in record["ivectors"]["log_likelihoods"].items():
        np.testing.assert_allclose(likelihoods, expected[name], rtol=1e-6)


def count_calls(name, step, done):
    def called(piece, model):
        done.append((name, piece["model"], piece["result"]))
        return step(piece, model)

    return called


@pytest.mark.slow
def test_killed_estimation_continues_in_other_processes(run, home):
    again = adapted.adapted_run(home, features=features(), runner={"kind": "processes", "workers": 1})
    output = ADAPT.output(again)
    output.clear()
    adapted.kills.killed_in(
        home, again.config.model_dump(mode="json", by_alias=True), "adapt", "^variability", reports=2
    )
    assert output.record() is None
    assert output.store.exists("work/ivectors/variability-2")
    seen = []
    with progress.listening(lambda stage, done, total, note: seen.append(note)):
        record = ADAPT.execute(again).record
    assert len([note for note in seen if note.startswith("variability")]) == SIZES["iterations"] - 2
    assert not [note for note in seen if note.startswith("background")]
    np.testing.assert_allclose(
        record["ivectors"]["log_likelihoods"]["variability"],
        run.result("adapt").record["ivectors"]["log_likelihoods"]["variability"],
        rtol=1e-6,
    )


def test_groups_contain_whole_speakers(run, tmp_path):
    static, _ = compute_features(run, run.config.align.features, "train", ObjectStore(str(tmp_path)), "align")
    speakers, sizes = static.index.column("speaker"), static.index.column("num_frames")
    groups = ivectors.speaker_groups(static, 300)
    assert sorted(row for rows in groups for row in rows) == list(range(len(static.index)))
    assert sum(len({speakers[row] for row in rows}) for rows in groups) == len(set(speakers))
    assert all(sum(sizes[row] for row in rows) >= 300 for rows in groups[:-1])
    assert len(ivectors.speaker_groups(static, 10**9)) == 1


def test_recognizer_computes_the_same_kinds_of_features(decoded, bundle):
    recognizer = Recognizer.load(bundle)
    about, waves = adapted.audio_of(decoded)
    speaker = about[0]["speaker"]
    own = [wave for row, wave in zip(about, waves, strict=True) if row["speaker"] == speaker]
    by_recognizer = recognizer.adapted(own)
    static = recognizer._adapter.static(own)
    expected = recognizer._extractor.ivector(torch.cat([recognizer._hmm.chain(frames) for frames in static]))
    extract = build_features(LogMelConfig(num_mels=MELS), 8000)
    transform = recognizer._adapter.transform(static)
    for feats, wave, frames in zip(by_recognizer, own, static, strict=True):
        assert feats.shape == (len(frames), decoded.config.features.width)
        torch.testing.assert_close(feats[:, :DIM], recognizer._hmm.chain(frames, transform))
        torch.testing.assert_close(feats[:, IVECTORS], expected.expand(len(frames), -1), rtol=1e-4, atol=1e-4)
        logmel = add_deltas(*extract(wave[None], torch.tensor([len(wave)])))[0]
        torch.testing.assert_close(feats[:, DIM + RANK :], logmel)
    nothing = recognizer.adapted([torch.zeros(10)])
    assert [tuple(feats.shape) for feats in nothing] == [(0, decoded.config.features.width)]


def test_bundle_decodes_like_the_stage(decoded, bundle, tmp_path):
    assert IVECTOR_FILE in check_files(bundle)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(bundle, elsewhere)
    expected = {row["id"]: row["hyp"] for row in read_table(decoded.result("decode").store, "test.parquet")}
    assert len(set(expected.values())) > 6
    decoded_alone = decode_with(decoded, elsewhere, "test", Recognizer.load(elsewhere).decoder.cfg, own=False)
    assert {hypothesis.id: hypothesis.hyp for hypothesis in decoded_alone} == expected


def test_bundle_needs_its_own_extractor(decoded, bundle, tmp_path):
    bare = adapted.fetch_bundle(decoded.result("train").output, tmp_path / "bare")
    adapted.loaded(decoded, tmp_path)
    cfg = Recognizer.load(bundle).spec.adaptation
    add_adaptation(bare, tmp_path / "model", cfg)
    with pytest.raises(BundleError, match=r"bare lacks an intact hmm/ivector\.safetensors"):
        Recognizer.load(bare, decoder_of(decoded))
    extractor = IvectorExtractor.load(bundle / IVECTOR_FILE)
    IvectorExtractor.random(extractor.model, RANK + 1).save(tmp_path / EXTRACTOR)
    add_adaptation(bare, tmp_path / "model", cfg, tmp_path / EXTRACTOR)
    with pytest.raises(BundleError, match=rf"i-vectors of {RANK + 1} dimensions, but the features .* have {RANK}"):
        Recognizer.load(bare, decoder_of(decoded))


def test_address_depends_on_the_parts(run):
    other = Run(parse_config(run.config.model_dump(mode="json", by_alias=True)), "other")
    other.results |= run.results
    assert ADAPT.output(other).key == run.result("adapt").key
    parts = list(run.config.features.parts)
    parts[1] = parts[1].model_copy(update={"gaussians": 9})
    other.config = run.config.model_copy(update={"features": run.config.features.model_copy(update={"parts": parts})})
    assert ADAPT.output(other).key != run.result("adapt").key


def appended(*parts, **fields):
    return configs.document(features={"kind": "appended", "parts": list(parts), **fields})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (configs.document(features="ivector"), "features.kind is ivector, the same in all frames of a speaker"),
        (appended("logmel"), r"none of the parts is adapted to speakers: add \{kind: fmllr\}"),
        (appended("ivector", "fmllr", "ivector"), "two parts are i-vectors: remove one"),
        (appended(), "too few items: at least 1, not 0"),
        (appended("fmllr", "appended"), "parts.1.kind: 'appended' is none of"),
        (appended({"kind": "fmllr", "dim": 30}), "set the dim of its part fmllr to 40"),
        (appended("fmllr", {"hop_ms": 5}), r"parts\.1\.hop_ms is 5, but frames of the whole come every 10 ms"),
        (appended("fmllr", {"frame_ms": 32}), r"a part logmel of frames of 32 ms, but align\.features\.frame_ms is 25"),
        (appended("fmllr", {"cmvn": "sliding"}), r"parts\.1\.cmvn is sliding, .* use speaker or global"),
        (appended("fmllr", {"stride": 2}), r"parts\.1\.stride is 2: set the stride of the whole"),
        (appended("fmllr", {"trim_db": 20}), r"parts\.1\.trim_db is set, but it has no effect in a part: remove it"),
        (appended("fmllr", num_mels=40), r"num_mels belongs to the parts: set it in one of features\.parts"),
        (appended("fmllr", stored=True), "adapted features are always stored"),
    ],
)
def test_incompatible_parts_are_named(document, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_default_parts_are_the_published_input():
    config = parse_config(configs.document(features="appended"))
    assert config.features.width == 260
    assert [part.width * part.frame_factor for part in config.features.components] == [40, 100, 120]
