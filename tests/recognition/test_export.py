"""Exported models: files that compute what the network does, in onnxruntime and in sherpa-onnx, and what is refused."""

import json
import subprocess
import sys
import wave as wav

import numpy as np
import pytest
import torch
from support import load_beside, tiny_bundle

from recognition import export
from recognition.bundle import BundleError, TiedStates
from recognition.export import export_bundle
from recognition.frame_stream import EndpointConfig, FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from recognition.systems import SYSTEMS
from recognition.systems.acoustic import Scores
from recognition.systems.attention import AttentionSystem
from recognition.systems.ctc import CtcSystem
from recognition.systems.token_networks import EncodedFrames
from recognition.systems.transducer import TransducerSystem
from speech.decoding import AttentionDecodeConfig, BeamConfig, GreedyConfig, TransducerDecodeConfig
from speech.features import FmllrConfig, LogMelConfig, MfccConfig, SherpaLogMelConfig, WhisperLogMelConfig
from speech.frontend import FeatureStream
from speech.models import (
    BlstmConfig,
    ChunkConfig,
    ConformerConfig,
    LatencyConfig,
    LstmEncoderConfig,
    LstmPredictorConfig,
    StatelessPredictorConfig,
    TdnnConfig,
    TransformerDecoderConfig,
)
from speech.tokens import TokenConfig, train_tokenizer

pytest.importorskip("onnxruntime", reason="the extra export is not installed: make setup")
pytest.importorskip("onnx", reason="the extra export is not installed: make setup")
tones = load_beside(__file__, "../training/tones.py")
onnx_script = load_beside(__file__, "../../recognition/standalone/with_onnxruntime.py")
RATE = tones.RATE
STATELESS = TransducerSystem(predictor=StatelessPredictorConfig(dim=16, dropout=0.0), joint_dim=24)
LSTM = TransducerSystem(predictor=LstmPredictorConfig(dim=16, layers=2, dropout=0.0), joint_dim=24)
ATTENTION = AttentionSystem(decoder_network=TransformerDecoderConfig(dim=16, heads=2, layers=2))
DECODERS = {
    "ctc": GreedyConfig(),
    "transducer": TransducerDecodeConfig(beam=1, times="none"),
    "attention": AttentionDecodeConfig(beam=1, ctc_weight=0.0, times="none", max_repeats=0),
}
KINDS = {
    "conformer": ("conformer", CtcSystem()),
    "blstm": ("blstm", CtcSystem()),
    "tdnn": ("tdnn", CtcSystem()),
    "stateless transducer": ("conformer", STATELESS),
    "transducer with an LSTM": ("blstm", LSTM),
    "attention": ("conformer", ATTENTION),
}
SHERPA = SherpaLogMelConfig(num_mels=20, cmvn="utterance")


def waves(count=4, seed=3):
    rng = np.random.default_rng(seed)
    return [tones.speak([tones.WORDS[int(k)] for k in rng.integers(0, 6, 1 + n)], rng) for n in range(count)]


def save(folder, model="conformer", system=None, features=SHERPA, tokens="characters", varied=False, **fields):
    """Save a network with large random weights in its last layer: its hypotheses have many tokens.

    `varied`: they have all tokens equally often, of a CTC model that reads speech as it comes.
    """
    system = system or CtcSystem()
    tokenizer = train_tokenizer(TokenConfig(kind=tokens), ["ba ce", "di fu gu ly"])
    stats = None
    if features.cmvn == "global":
        stats = tones.CmvnStats(features.width)
        for wave in waves():
            stats.add(*tones.build_features(features, RATE)(wave[None], torch.tensor([len(wave)])))
    values = {"features": features, "stats": stats and stats.to_dict(), "tokenizer": tokenizer.to_dict()}
    model = tones.bare(model) if isinstance(model, str) else model
    values |= {"model": model, "system": system, "decode": DECODERS.get(system.kind, GreedyConfig())}
    spec = tones.BundleSpec(sample_rate=RATE, **(values | fields))
    torch.manual_seed(5)
    network = spec.build_model()
    for name, weights in network.named_parameters():
        if "output" in name or name.startswith("joiner"):
            weights.data.mul_(6.0)
    if varied:
        (heard,), _ = spec.build_frontend()(
            torch.cat(waves(seed=9))[None], torch.tensor([len(torch.cat(waves(seed=9)))])
        )
        with torch.no_grad():
            scores = network.eval().outputs(heard[None], torch.tensor([len(heard)]))[0][0]
            scale = 3.0 / scores.std(0)
            network.output.weight.mul_(scale[:, None])
            network.output.bias.sub_(scores.mean(0)).mul_(scale)
    spec.save(folder, dict(network.state_dict()))
    return spec


def own_words(bundle, waves):
    recognizer = Recognizer.load(bundle)
    return [recognizer.search(recognizer.encode(wave[None], torch.tensor([len(wave)])))[0].text for wave in waves]


def words_by_onnxruntime(folder, waves, int8=False):
    model = onnx_script.Model(folder, int8)
    return [model.recognize(wave.numpy()) for wave in waves]


def words_by_sherpa(folder, waves, int8=False):
    pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: make setup")
    script = load_beside(__file__, "../../recognition/standalone/with_sherpa_onnx.py")
    recognizer = script.load(folder, int8)
    return [" ".join(script.recognize(recognizer, wave.numpy(), RATE).split()) for wave in waves]


# --- every kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.variants(3)
def test_files_compute_what_the_network_does_and_give_its_words(kind, tmp_path):
    model, system = KINDS[kind]
    save(tmp_path / "bundle", model, system)
    described = export_bundle(tmp_path / "bundle", tmp_path / "out", "plain")
    whole = {name: facts["difference"] for name, facts in described["files"].items() if ".int8." not in name}
    assert set(whole) == {"features.onnx", *(f"{name}.onnx" for name in described["graphs"])}
    assert max(whole.values()) <= 1e-4
    assert all(facts["difference"] < 0.2 for facts in described["files"].values())
    spoken = waves()
    own = own_words(tmp_path / "bundle", spoken)
    assert any(own)
    assert words_by_onnxruntime(tmp_path / "out", spoken) == own


@pytest.mark.parametrize("tokens", ["characters", "words"])
@pytest.mark.parametrize("features", [SHERPA, LogMelConfig(num_mels=20)], ids=lambda features: features.kind)
@pytest.mark.parametrize("system", [CtcSystem(), STATELESS], ids=lambda system: system.kind)
@pytest.mark.variants(3)
def test_sherpa_onnx_recognizes_the_same_words(system, features, tokens, tmp_path):
    save(tmp_path / "bundle", "tdnn", system, features, tokens)
    described = export_bundle(tmp_path / "bundle", tmp_path / "out", int8=False)
    assert described["layout"] == "sherpa-onnx"
    assert described["sherpa_onnx"]["all_interfaces"] == (features.kind == "sherpa_logmel")
    spoken = waves()
    own = own_words(tmp_path / "bundle", spoken)
    assert len(" ".join(own)) > 10
    assert words_by_sherpa(tmp_path / "out", spoken) == own


def test_trained_model_recognizes_the_same_words_in_int8_and_in_sherpa_onnx(trained, corpus, tmp_path):
    described = export_bundle(trained.bundle, tmp_path / "out")
    assert described["files"]["model.onnx"]["difference"] <= 1e-4
    spoken = waves(6)
    own = own_words(trained.bundle, spoken)
    assert len(" ".join(own).split()) > 8
    assert words_by_sherpa(tmp_path / "out", spoken) == own
    assert words_by_sherpa(tmp_path / "out", spoken, int8=True) == own


# --- speech as it comes

CONFORMER = ConformerConfig(
    dim=16, layers=2, heads=2, kernel=5, feed_forward=2, channels=3, subsampling=4, chunk=ChunkConfig(left=6), dropout=0
)
LSTM_AHEAD = LstmEncoderConfig(dim=24, layers=2, channels=3, subsampling=2, lookahead=3, dropout=0)
BLSTM_AHEAD = BlstmConfig(dim=16, layers=2, channels=3, chunk=LatencyConfig(ahead=2), dropout=0)
TDNN = TdnnConfig(**TdnnConfig.tiny | {"layers": 3, "dropout": 0, "subsampling": 2})
STREAMS = {
    "conformer": (CONFORMER, CtcSystem()),
    "conformer that remembers no frame": (CONFORMER.model_copy(update={"chunk": ChunkConfig(left=0)}), CtcSystem()),
    "lstm": (LSTM_AHEAD, CtcSystem()),
    "blstm": (BLSTM_AHEAD, CtcSystem()),
    "tdnn": (TDNN, CtcSystem()),
    "conformer transducer": (CONFORMER, STATELESS),
    "lstm transducer": (LSTM_AHEAD, STATELESS),
    "blstm transducer": (BLSTM_AHEAD, STATELESS),
    "transducer with an LSTM": (CONFORMER, LSTM),
}
HEARD = SherpaLogMelConfig(num_mels=20, cmvn="global")


def export_stream(tmp_path, kind, layout, features=HEARD, chunk_ms=160, **options):
    model, system = STREAMS[kind]
    save(tmp_path / "bundle", model, system, features, varied=system.kind == "ctc")
    export_bundle(tmp_path / "bundle", tmp_path / "out", layout, chunk_ms=chunk_ms, **options)
    return json.loads((tmp_path / "out" / "model.json").read_text(encoding="utf-8"))["stream"]


def chunk_outputs(recognizer, feats, sizes, count):
    """What the network puts out for the first chunks of a stream of features, as the search reads it."""
    spec = recognizer.spec
    frames = sizes["shift"] // spec.network.subsampling // spec.features.stride
    encoder, ctc = getattr(recognizer.model, "encoder", recognizer.model), spec.system.kind == "ctc"
    with torch.inference_mode():
        run = encoder.forward_chunk if ctc else encoder.chunk_outputs
        outputs, _ = run(feats[None], encoder.stream_state(1, frames), last=True)
        return outputs[:, : count * frames]


def own_words_of_chunks(bundle, wave, sizes, strict):
    """The words of those chunks that a reader of windows has heard when silence has followed."""
    recognizer = Recognizer.load(bundle)
    wave = torch.cat((wave, torch.zeros(int(sizes["tail_s"] * RATE))))
    stream = FeatureStream(recognizer.frontend)
    feats = stream.accept(wave)
    heard = (len(wave) + sizes["lead"] - sizes["frame_length"]) // sizes["hop_length"] + 1
    outputs = chunk_outputs(recognizer, feats, sizes, 1 + (heard - strict - sizes["window"]) // sizes["shift"])
    counts, start = torch.tensor([outputs.shape[1]]), torch.zeros(1)
    ctc = recognizer.spec.system.kind == "ctc"
    encoded = Scores(outputs, counts, start) if ctc else EncodedFrames(outputs, counts, start, None)
    return recognizer.search(encoded)[0].text


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.variants(3)
def test_chunks_of_a_file_are_those_of_the_network_and_give_its_words(kind, tmp_path):
    sizes = export_stream(tmp_path, kind, "plain")
    recognizer, speech = Recognizer.load(tmp_path / "bundle"), torch.cat(waves())
    extract = recognizer.frontend.extract
    raw = extract(speech[None], torch.tensor([len(speech)]))[0][0]
    feats = recognizer.frontend(raw[None], torch.tensor([len(raw)]))[0][0]
    count = 1 + (len(raw) - sizes["window"]) // sizes["shift"]
    assert count > 4
    expected = chunk_outputs(recognizer, feats, sizes, count)
    ctc = recognizer.spec.system.kind == "ctc"
    if not ctc:
        with torch.inference_mode():
            expected = recognizer.model.joiner.encoder(expected)
    for int8, most in ((False, 1e-4), (True, 0.25)):
        file = onnx_script.Model(tmp_path / "out", int8)
        name = "model" if ctc else "encoder"
        state, parts = np.zeros((1, file.graphs[name].get_inputs()[1].shape[1]), np.float32), []
        for start in range(0, count * sizes["shift"], sizes["shift"]):
            outputs, state = file.run(name, raw[None, start : start + sizes["window"]].numpy(), state)
            parts.append(torch.from_numpy(outputs))
        got = torch.cat(parts, dim=1)
        apart = (got.exp() - expected.exp() if ctc else (got - expected) / expected.abs().max()).abs().max()
        assert apart < most
    spoken = [torch.cat(waves(seed=seed)) for seed in (3, 4)]
    own = [own_words_of_chunks(tmp_path / "bundle", wave, sizes, strict=0) for wave in spoken]
    assert len(" ".join(own)) > 10
    assert words_by_onnxruntime(tmp_path / "out", spoken) == own


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        *((kind, HEARD) for kind, (_, system) in STREAMS.items() if system != LSTM),
        ("conformer", LogMelConfig(num_mels=20)),
        ("lstm transducer", LogMelConfig(num_mels=20, stride=2)),
    ],
)
@pytest.mark.variants(3)
def test_sherpa_onnx_recognizes_the_same_words_as_they_come(kind, features, tmp_path):
    sizes = export_stream(tmp_path, kind, "sherpa-onnx", features, int8=False)
    spoken = [torch.cat(waves(seed=seed)) for seed in (3, 4)]
    own = [own_words_of_chunks(tmp_path / "bundle", wave, sizes, strict=1) for wave in spoken]
    assert len(" ".join(own)) > 10
    assert words_by_sherpa(tmp_path / "out", spoken) == own


@pytest.mark.slow
def test_trained_transducer_recognizes_the_test_set_in_sherpa_onnx_as_in_its_own_stream(corpus, tmp_path):
    chunks = {"chunk": ChunkConfig(longest=6)}
    spec = corpus.spec("conformer", model=tones.bare("conformer").model_copy(update=chunks), system=STATELESS)
    changes = {**tones.LEARNS, "objective": "transducer", "epochs": 30, "average": 2, "optimizer": {"lr": 1e-2}}
    bundle = tones.train_here(corpus.job(tmp_path / "job", spec=spec, **changes)).bundle
    sizes = export_bundle(bundle, tmp_path / "out", chunk_ms=160)["stream"]
    recognizer = Recognizer.load(bundle, TransducerDecodeConfig(beam=1, times="none"))
    cfg = FrameStreamConfig(chunk_ms=160, endpoint=EndpointConfig(after_speech_s=0, at_start_s=0, longest_s=3600))
    spoken = [tones.decode_audio(sample.members["flac"])[0] for sample in corpus.valid]
    own = []
    for wave in spoken:
        stream = FrameStream(recognizer, cfg, RATE)
        stream.accept(np.pad(wave.numpy(), (0, int(sizes["tail_s"] * RATE))))
        own.append(" ".join(result.text for result in stream.finish()))
    said = [word for text in own for word in text.split()]
    assert len(said) > 12
    assert len(set(said)) > 4
    assert words_by_sherpa(tmp_path / "out", spoken) == own
    assert words_by_sherpa(tmp_path / "out", spoken, int8=True) == own


@pytest.mark.parametrize("kind", ["conformer", "conformer transducer"])
@pytest.mark.variants(1)
def test_streams_of_sherpa_onnx_are_those_of_this_project_and_do_not_mix(kind, tmp_path):
    """Several at once, at different places of their recordings, each ending at the end of a chunk."""
    sizes = export_stream(tmp_path, kind, "sherpa-onnx", LogMelConfig(num_mels=20))
    pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: make setup")
    script = load_beside(__file__, "../../recognition/standalone/with_sherpa_onnx.py")
    engine, recognizer = script.load(tmp_path / "out").engine, Recognizer.load(tmp_path / "bundle")
    spoken = [
        wave[: (len(wave) - 200) // 1280 * 1280 + 200].numpy()
        for wave in (waves(2)[1], torch.cat(waves()), *waves(4)[2:])
    ]
    cfg = FrameStreamConfig(chunk_ms=160, endpoint=EndpointConfig(after_speech_s=0, at_start_s=0, longest_s=3600))
    own = [[result.text for result in FrameStream(recognizer, cfg, RATE).accept(wave)] for wave in spoken]
    streams = [engine.create_stream() for _ in spoken]
    for start in range(0, max(map(len, spoken)), 700):
        for stream, wave in zip(streams, spoken, strict=True):
            stream.accept_waveform(RATE, wave[start : start + 700])
        while ready := [stream for stream in streams if engine.is_ready(stream)]:
            engine.decode_streams(ready)
    texts = [" ".join(engine.get_result(stream).text.split()) for stream in streams]
    assert texts == [" ".join(shown[-1:]) for shown in own]
    assert len(set(texts)) > 2
    assert sizes["latency_ms"] == 160


@pytest.mark.parametrize("features", [HEARD, LogMelConfig(num_mels=20, cmvn="none", hop_ms=40, frame_ms=20)])
@pytest.mark.variants(1)
def test_script_hears_the_same_in_pieces_of_any_length(features, tmp_path):
    export_stream(tmp_path, "conformer", "plain", features, int8=False)
    model, speech = onnx_script.Model(tmp_path / "out"), torch.cat(waves()).numpy()
    texts = []
    for size in (100, 1111, len(speech)):
        stream = onnx_script.ModelStream(model)
        for start in range(0, len(speech), size):
            stream.accept(speech[start : start + size])
        texts.append(stream.text)
    assert texts[0] == texts[1] == texts[2] != ""


@pytest.mark.parametrize("model", [LSTM_AHEAD, BLSTM_AHEAD], ids=lambda model: model.kind)
def test_weights_that_are_used_twice_are_quantized_too(model, tmp_path):
    """By the chunk, and by the frames after it."""
    save(tmp_path / "bundle", model.model_copy(update={"dim": 64}), features=HEARD)
    files = export_bundle(tmp_path / "bundle", tmp_path / "out", chunk_ms=160)["files"]
    assert files["model.int8.onnx"]["bytes"] < 0.7 * files["model.onnx"]["bytes"]
    assert files["model.int8.onnx"]["difference"] < 0.2


def test_readme_of_a_stream_says_what_reads_it_and_how_late_it_is(tmp_path):
    export_stream(tmp_path, "lstm transducer", "sherpa-onnx", int8=False, chunk_ms=100)
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "give its online recognizer the files as a transducer" in readme
    assert "in chunks of 100 ms, each when 160 ms from its start have been heard" in readme


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"system": ATTENTION, "features": HEARD}, "kind attention searches whole utterances: export it without"),
        ({"model": "conformer", "features": HEARD}, "trained without model.chunk"),
        ({"model": TDNN}, "features.cmvn=utterance .*: set features.cmvn=global"),
        ({"model": CONFORMER, "features": LogMelConfig(num_mels=20, splice_left=1)}, "splicing"),
        ({"model": CONFORMER, "features": LogMelConfig(cmvn="sliding", cmvn_center=False)}, "sliding window"),
    ],
)
def test_what_cannot_be_exported_for_streams_is_refused_with_a_remedy(fields, reason, tmp_path):
    save(tmp_path / "bundle", **fields)
    with pytest.raises(ValueError, match=reason):
        export_bundle(tmp_path / "bundle", tmp_path / "out", chunk_ms=160)


def test_blstm_with_chunks_is_exported_for_streams_only(tmp_path):
    assert "export it with --stream" in refused(tmp_path, model=BLSTM_AHEAD, features=HEARD)


# --- what is in the graphs


NORMALIZED = {
    "no normalization": LogMelConfig(num_mels=16, cmvn="none"),
    "of the training set": LogMelConfig(num_mels=16, cmvn="global", cmvn_floor=4, cmvn_gate_db=20),
    "of a sliding window, of loud frames": LogMelConfig(num_mels=16, cmvn="sliding", cmvn_window=30, cmvn_gate_db=20),
    "trimmed": LogMelConfig(num_mels=16, cmvn="utterance", cmvn_gate_db=20, cmvn_floor=3, trim_db=21),
    "deltas, splicing and stride": LogMelConfig(num_mels=8, cmvn="utterance", delta_order=2, splice_left=1, stride=2),
    "cepstra": MfccConfig(num_mels=16, num_ceps=8, cmvn="utterance"),
    "leveled": LogMelConfig(num_mels=16, cmvn="none", level_db=-20),
}


@pytest.mark.parametrize("name", NORMALIZED)
@pytest.mark.variants(3)
def test_what_precedes_the_network_is_in_the_graph(name, tmp_path):
    features = NORMALIZED[name]
    spec = save(tmp_path / "bundle", "tdnn", features=features)
    export_bundle(tmp_path / "bundle", tmp_path / "out", "plain", int8=False)
    model, recognizer = onnx_script.Model(tmp_path / "out"), Recognizer.load(tmp_path / "bundle")
    for wave in (*waves(2), waves(1)[0][:420]):  # the last one has fewer frames than a statistic of loud ones needs
        samples = wave.numpy()[None]
        feats, frames = model.run("features", samples, np.array([len(wave)]))
        log_probs, counts = model.run("model", feats, frames)
        with torch.inference_mode():
            heard = spec.build_frontend().trimmed(torch.from_numpy(feats), torch.from_numpy(frames))
            own, own_counts = recognizer.model(*heard[:2])
        assert counts.tolist() == own_counts.tolist()
        torch.testing.assert_close(torch.from_numpy(log_probs).exp(), own.exp(), atol=1e-4, rtol=0)
    if not features.trim_db:  # whose frames at the ends differ: silence is added to features there
        assert words_by_onnxruntime(tmp_path / "out", waves()) == own_words(tmp_path / "bundle", waves())


def test_padding_and_the_rest_of_the_batch_change_nothing(tmp_path):
    save(tmp_path / "bundle", "blstm")
    export_bundle(tmp_path / "bundle", tmp_path / "out", "plain", int8=False)
    model = onnx_script.Model(tmp_path / "out")
    feats = np.random.default_rng(1).normal(5, 3, (3, 61, 20)).astype(np.float32)
    lengths = np.array([61, 17, 2])
    feats[1, 17:], feats[2, 2:] = np.nan, -23.0
    together, counts = model.run("model", feats, lengths)
    for row, length in enumerate(lengths):
        alone, (count,) = model.run("model", feats[row : row + 1, :length], lengths[row : row + 1])
        assert count == counts[row]
        np.testing.assert_allclose(together[row, :count], alone[0], atol=1e-5)
        assert (together[row, count:] == 0).all()


def test_a_graph_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    save(tmp_path / "bundle", "tdnn")
    monkeypatch.setattr("speech.features.cmvn.STD_FLOOR", 1e-3)
    monkeypatch.setattr("recognition.onnx_graphs.difference", lambda *_: float("nan"))
    with pytest.raises(ValueError, match=r"model.onnx differs from the model .* by nan"):
        export_bundle(tmp_path / "bundle", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


# --- what is in the folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save(folder / "bundle", "tdnn", STATELESS, decode=TransducerDecodeConfig(beam=3))
    described = export_bundle(folder / "bundle", folder / "out", about={"name": "mine"}, card="# A card")
    return folder / "out", described


def test_folder_has_files_tokens_description_and_card(exported):
    folder, described = exported
    graphs = {f"{name}{kind}.onnx" for name in ("encoder", "predictor", "joiner") for kind in ("", ".int8")}
    texts = {"tokens.txt", "model.json", "README.md", "MODEL_CARD.md", "recognize.py"}
    assert {path.name for path in folder.iterdir()} == graphs | texts
    assert json.loads((folder / "model.json").read_text(encoding="utf-8")) == described
    for name, facts in described["files"].items():
        assert export.file_sha256(folder / name) == facts["sha256"]
    tokens = (folder / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert tokens[:2] == ["<blank> 0", "▁ 1"]
    assert len(tokens) == described["tokens"]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# mine\n")
    for part in ("8,000 Hz", "modified_beam_search", "MODEL_CARD.md", "20 bands", "feature dimension 20"):
        assert part in readme


def test_files_have_the_metadata_that_sherpa_onnx_looks_up(exported):
    import onnxruntime

    folder, described = exported
    wanted = {
        "encoder": {"model_type": "conformer", "subsampling_factor": "4", "feature_dim": "20"},
        "predictor": {"context_size": "2", "vocab_size": str(described["tokens"])},
        "joiner": {"joiner_dim": "24", "vocab_size": str(described["tokens"])},
    }
    for name, fields in wanted.items():
        for kind in ("", ".int8"):
            session = onnxruntime.InferenceSession(str(folder / f"{name}{kind}.onnx"))
            assert fields.items() <= session.get_modelmeta().custom_metadata_map.items()


def test_script_beside_the_files_recognizes_without_this_project(exported, tmp_path):
    pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: make setup")
    (spoken,) = waves(1)
    with wav.open(str(tmp_path / "a b.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((spoken.numpy() * 32767).astype(np.int16).tobytes())
    command = [sys.executable, str(exported[0] / "recognize.py"), "--int8", str(tmp_path / "a b.wav")]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'a b.wav'}\t")


def test_folder_that_is_not_empty_is_refused_and_left_as_it_is(exported, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"full exists and is not an empty folder: name another one with --to"):
        export_bundle(exported[0].parent / "bundle", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


# --- what cannot be exported


def refused(tmp_path, layout=None, **fields):
    save(tmp_path / "bundle", **fields)
    with pytest.raises(ValueError, match=r"\S") as caught:
        export_bundle(tmp_path / "bundle", tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"system": ATTENTION}, "no models of kind attention"),
        ({"system": LSTM}, "stateless predictors, and this one's is lstm"),
        ({"features": MfccConfig(num_mels=20)}, "does not compute features of kind mfcc"),
        ({"features": LogMelConfig(num_mels=20, hop_ms=12.5)}, "other values than features.hop_ms 12.5"),
        ({"features": LogMelConfig(num_mels=20, level_db=-20)}, "features.level_db -20.0"),
    ],
)
def test_what_sherpa_onnx_cannot_run_is_refused_with_a_remedy_and_exported_plainly(fields, reason, tmp_path):
    message = refused(tmp_path, "sherpa-onnx", **fields)
    assert message.startswith("sherpa-onnx cannot run this model: ")
    assert reason in message
    assert message.endswith("Export it with --layout plain")


def test_layout_is_plain_by_default_where_sherpa_onnx_cannot_run_the_model(tmp_path):
    spec = save(tmp_path / "bundle", features=MfccConfig(num_mels=20, cmvn="utterance"))
    assert export._chosen(spec, None) == "plain"


def test_hybrid_models_are_refused(tmp_path):
    states = TiedStates(model="ab" * 32, frame_shift_ms=10.0, log_priors=(-0.7, -0.7))
    message = refused(tmp_path, system=SYSTEMS["hybrid"](), states=states)
    assert "kind hybrid cannot be exported" in message
    assert "starling transcribe" in message


def test_gmm_models_features_of_whisper_and_adapted_ones_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="has no bundle.json"):
        export_bundle(tmp_path / "empty", tmp_path / "out")
    assert "whisper_logmel" in refused(tmp_path, features=WhisperLogMelConfig(num_mels=20))
    spec = save(tmp_path / "other")
    with pytest.raises(ValueError, match="adapted to speakers"):
        export.check_exportable(spec.model_copy(update={"features": FmllrConfig()}))


def test_pretrained_encoders_are_refused(tmp_path):
    from speech.models import WhisperConfig

    spec = save(tmp_path / "bundle")
    with pytest.raises(ValueError, match=r"a pretrained one \(whisper\).*starling transcribe"):
        export.check_exportable(spec.model_copy(update={"model": WhisperConfig(**WhisperConfig.tiny)}))


def test_missing_packages_are_named_with_the_extra(tmp_path, monkeypatch):
    tiny_bundle(tmp_path / "bundle")
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(ValueError, match=r"needs the package onnxruntime: pip install '.\[export\]'"):
        export_bundle(tmp_path / "bundle", tmp_path / "out")


def test_beam_of_other_decoders_is_no_option_of_sherpa_onnx(tmp_path):
    spec = save(tmp_path / "bundle", decode=BeamConfig(beam=7))
    assert export._sherpa_options(spec)["search"] == {"decoding_method": "greedy_search"}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_every_system_has_graphs_or_says_what_works_instead(kind):
    if kind in DECODERS:
        return  # exported above
    with pytest.raises(ValueError, match=rf"kind {kind} cannot be exported: .*`starling transcribe`"):
        SYSTEMS[kind]().graphs(None, None, None)
