"""A bundle with NaN weights loaded, and transcribed everything to an empty text."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import load_file, save_file

from recognition.bundle import BundleError, load_bundle, load_spec, save_bundle
from recognition.transcriber import Transcriber
from speech.files import check_finite
from speech.hmm.gmm import DiagGmm
from speech.hmm.ivector import BackgroundModel, IvectorExtractor
from speech.hmm.model import ModelError
from speech.lm import LmError, LmSpec, LstmConfig, read_network
from speech.lm.hidden_classes import _WORDS, MODEL, HiddenClassConfig, HiddenClassEstimator
from speech.lm.vocabulary import SPECIAL
from tasks.tracking.pyfunc_model import SpeechRecognizer


def spoil(path, name, value):
    """Write a safetensors file with one other number."""
    tensors = load_file(path)
    tensors[name].view(-1)[3] = value
    save_file(tensors, path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bundle_with_such_weights_is_refused_by_name(bundle, value):
    path = bundle / "model.safetensors"
    weights = load_file(path)
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point() and tensor.numel() > 3)
    spoil(path, name, value)
    save_bundle(bundle, load_spec(bundle), load_file(path))
    loads = [
        lambda: load_bundle(bundle),
        lambda: Transcriber(bundle),
        lambda: SpeechRecognizer().load_context(SimpleNamespace(artifacts={"bundle": bundle})),
    ]
    for load in loads:
        with pytest.raises(
            BundleError, match=rf"model\.safetensors is damaged: 1 of the \d+ numbers of {name} are not"
        ):
            load()


def test_language_models_and_extractors_with_such_weights_are_refused_by_name(tmp_path):
    spec = LmSpec(network=LstmConfig(dim=6), words=(*SPECIAL, "a"))
    weights = spec.build_model().state_dict()
    next(iter(weights.values())).view(-1)[0] = math.nan
    spec.save(tmp_path, weights)
    with pytest.raises(LmError, match=r"lm\.safetensors cannot be read .* numbers of .* are not finite"):
        read_network(tmp_path / "lm.safetensors")

    parts = {name: np.full(shape, 0.5) for name, shape in (("first", 2), ("following", (2, 3)), ("words", (2, 4)))}
    parts["words"][1, 2] = math.nan
    (tmp_path / MODEL).write_bytes(save_arrays(parts, {_WORDS: json.dumps(["a"])}))
    with pytest.raises(LmError, match=r"hmm\.safetensors: .* 1 of the 8 numbers of words are not finite"):
        HiddenClassEstimator(HiddenClassConfig()).load(tmp_path)

    gmm = DiagGmm(torch.ones(1, 2) / 2, torch.zeros(1, 2, 3), torch.ones(1, 2, 3))
    path = tmp_path / "ivector.safetensors"
    IvectorExtractor(BackgroundModel(gmm), torch.full((2, 3, 1), math.inf, dtype=torch.float64)).save(path)
    with pytest.raises(ModelError, match=r"ivector\.safetensors .*6 of the 6 numbers of loadings are not finite"):
        IvectorExtractor.load(path)


def test_finite_weights_are_accepted():
    check_finite({"one": torch.zeros(3), "count": torch.ones(2, dtype=torch.int64), "none": torch.zeros(0)})
    check_finite({"half": torch.ones(2, dtype=torch.bfloat16), "array": np.zeros(2)})
