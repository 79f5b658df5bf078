"""Sizes that a bundle's JSON asks for: networks of 25 GB were allocated before the file of weights was looked at.

The limits on memory and time are those of the tests themselves: what is asked for here fits into no machine.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recognition.bundle import BundleError, BundleSpec, TiedStates, load_bundle, save_bundle
from speech.features import CmvnStats, LogMelConfig
from speech.lm.base import LmError
from speech.lm.lstm import LstmConfig
from speech.lm.network import HEADER, MODEL, LmSpec, read_network
from speech.lm.vocabulary import SPECIAL
from speech.models import MODELS

HUGE, ENDLESS = 10**6, 10**30  # a million layers; a size that no tensor counts


def write(folder, kind="conformer", **changes):
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6),
        stats=CmvnStats(6).add(torch.randn(40, 6)).to_dict(),
        tokenizer={"kind": "characters", "symbols": ["<blank>", "a"]},
        model=MODELS[kind].model_validate(MODELS[kind].tiny),
        **changes,
    )
    save_bundle(folder, spec, spec.build_model().state_dict())


def edited(folder, path, value):
    """A bundle with another value in its description."""
    file = folder / "bundle.json"
    content = json.loads(file.read_text()) | {"checksum": ""}
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place[name]
    place[last] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", MODELS)
def test_bundle_with_the_right_sizes_is_read(tmp_path, kind):
    write(tmp_path, kind)
    assert load_bundle(tmp_path)[1](torch.zeros(1, 9, 6), torch.tensor([9]))[0].shape[2] == 2


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.dim", 400_000),
        ("model.dim", ENDLESS),
        ("model.layers", HUGE),
        ("model.layers", ENDLESS),
        ("model.channels", 10**9),
        ("model.subsampling", 8),
        ("features.splice_left", 10**9),
        ("features.delta_order", 2),
    ],
)
def test_weights_are_not_allocated_before_the_file_has_them(tmp_path, kind, path, value):
    if MODELS[kind].packages and path in ("model.channels", "model.subsampling"):
        pytest.skip("a pretrained encoder has no weights of this size")
    write(tmp_path, kind)
    edited(tmp_path, path, value)
    with pytest.raises(BundleError, match=r"model\.safetensors.* does not match its bundle\.json"):
        load_bundle(tmp_path)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("conformer", "model.kernel", 10**9 + 1),
        ("conformer", "model.feed_forward", 10**9),
        ("blstm", "model.bottleneck", 10**9),
        ("tdnn", "model.prefinal", 10**9),
        ("whisper", "model.encoder.encoder_ffn_dim", 10**9),
        ("whisper", "model.encoder.encoder_attention_heads", 0),
        ("whisper", "model.encoder.activation_function", "exec"),
        ("wav2vec2", "model.encoder.intermediate_size", ENDLESS),
        ("wav2vec2", "model.encoder.conv_dim", [10**9, 10**9]),
        ("wav2vec2", "model.encoder.conv_dim", 3),
        ("wav2vec2", "model.encoder.num_conv_pos_embeddings", 10**9),
        ("wav2vec2", "model.encoder.model_type", "bert"),
    ],
)
def test_sizes_of_single_kinds_are_not_believed(tmp_path, kind, path, value):
    write(tmp_path, kind)
    edited(tmp_path, path, value)
    with pytest.raises(BundleError, match="does not match"):
        load_bundle(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("features.frame_ms", 1e9, "frame_ms"),
        ("features.hop_ms", 1e9, "hop_ms"),
        ("features.num_mels", 10**9, "num_mels"),
        ("features", {"kind": "plp", "lpc_order": 10**9}, "lpc_order"),
        ("features", {"kind": "mfcc", "num_mels": 10**9, "num_ceps": 6}, "num_mels"),
        ("features", {"kind": "waveform", "samples": 10**9}, "samples"),
        ("sample_rate", 10**12, "sample_rate"),
        ("sample_rate", 0, "sample_rate"),
        ("stats", CmvnStats(7).add(torch.randn(40, 7)).to_dict(), "7 features, but there are 6"),
        ("stats", {"count": float("inf"), "sum": [0], "sumsq": [0]}, "CMVN|cannot convert"),
    ],
)
def test_impossible_front_end_is_refused(tmp_path, path, value, name):
    write(tmp_path)
    edited(tmp_path, path, value)
    with pytest.raises(BundleError, match=name):
        load_bundle(tmp_path)


@pytest.mark.parametrize("shift", [1e-9, 0.0, float("nan"), -10.0])
def test_output_frames_of_millions_of_aligned_frames_are_refused(tmp_path, shift):
    write(tmp_path, states=TiedStates(model="ab" * 32, frame_shift_ms=10.0, log_priors=(-0.7, -0.7)))
    load_bundle(tmp_path)
    edited(tmp_path, "states.frame_shift_ms", shift)
    with pytest.raises(BundleError, match=r"frame_shift_ms|1 to 100 times"):
        load_bundle(tmp_path)


def write_network(folder, **changes):
    """A language model whose header describes another network than its weights are of."""
    spec = LmSpec(network=LstmConfig(dim=4), words=(*SPECIAL, "a", "b"))
    spec.save(folder, dict(spec.build_model().state_dict()))
    with safe_open(folder / MODEL, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    header["words"] = changes.pop("words", header["words"])
    header["network"] |= changes
    save_file(weights, folder / MODEL, {HEADER: json.dumps(header)})
    return folder / MODEL


@pytest.mark.parametrize("changes", [{"dim": 400_000}, {"dim": ENDLESS}, {"layers": HUGE}, {"words": list("abcdefgh")}])
def test_network_of_words_is_not_allocated_before_the_file_has_it(tmp_path, changes):
    with pytest.raises(LmError, match="cannot be read as a language model"):
        read_network(write_network(tmp_path, **changes))


def test_network_of_words_with_a_word_listed_twice_is_refused(tmp_path):
    assert len(read_network(write_network(tmp_path)).words) == 5
    with pytest.raises(LmError, match="listed twice"):
        read_network(write_network(tmp_path, words=[*SPECIAL, "a", "a"]))
