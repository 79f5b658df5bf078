"""Training begins with another model's weights: what is taken, what is refused, what stays the same."""

import pytest
import torch

from recognition.bundle import BundleSpec, TiedStates, load_bundle, save_bundle
from recognition.initial_weights import (
    InitialWeights,
    SourceError,
    check_source,
    open_source,
    save_initial,
    transfer_weights,
)
from recognition.systems.acoustic import AcousticTaskConfig
from speech.features import LogMelConfig
from speech.models import MODELS
from speech.tokens import CharacterTokenizer, WordTokenizer
from storage.objects import ObjectStore

FEATURES = LogMelConfig(num_mels=16, cmvn="none")
LETTERS = CharacterTokenizer(["<blank>", "a", "b", "c"])


def make_spec(kind="conformer", tokenizer=LETTERS, **fields):
    model = MODELS[kind].model_validate({**MODELS[kind].tiny, "dropout": 0.1})
    given = {"sample_rate": 8000, "features": FEATURES, "stats": None, "tokenizer": tokenizer.to_dict(), "model": model}
    return BundleSpec(**given | fields)


def make_bundle(folder, spec):
    torch.manual_seed(1)
    save_bundle(folder, spec, {name: tensor.contiguous() for name, tensor in spec.build_model().state_dict().items()})
    return open_source(folder)


def take(source, spec):
    check_source(source, spec, "models:/m/3")
    torch.manual_seed(2)
    return transfer_weights(source, spec, spec.build_model())


def outputs(network):
    feats = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return network.eval()(feats, torch.tensor([24, 15]))[0]


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_model_starts_with_the_outputs_of_the_one_it_begins_with(tmp_path, kind):
    spec = make_spec(kind)
    transfer = take(make_bundle(tmp_path / "bundle", spec), spec)
    assert (transfer.new, transfer.rows, transfer.left_out) == ((), {}, ())
    assert transfer.outputs == {"kept": 4, "new": 0, "left_out": 0}
    initial = save_initial(transfer, ObjectStore(str(tmp_path / "output")))
    task = AcousticTaskConfig(spec=spec, train_url="unused", valid_url="unused", initial=initial)
    assert torch.equal(outputs(task.build_network()), outputs(load_bundle(tmp_path / "bundle")[1]))
    assert task.new_parameters == frozenset()


@pytest.mark.parametrize("kind", list(MODELS))
def test_tokens_that_both_have_keep_their_rows(tmp_path, kind):
    more = CharacterTokenizer(["<blank>", "b", "d", "a"])
    source, spec = make_bundle(tmp_path, make_spec(kind)), make_spec(kind, more)
    transfer = take(source, spec)
    theirs = source.weights()
    torch.manual_seed(2)
    fresh = spec.build_model().state_dict()
    for name in ("output.weight", "output.bias"):
        rows = transfer.weights[name]
        for own, place in ((0, 0), (1, 2), (3, 1)):
            assert torch.equal(rows[own], theirs[name][place])
        assert torch.equal(rows[2], fresh[name][2])
    assert transfer.rows == {"output.weight": (3, 4), "output.bias": (3, 4)}
    assert transfer.outputs == {"kept": 3, "new": 1, "left_out": 1}
    assert set(transfer.incomplete) == {"output.weight", "output.bias"}
    assert len(transfer.taken) == len(transfer.weights) - 2
    assert "3 of 4 rows of output.weight" in transfer.text()


def test_tokens_of_another_kind_keep_the_blank_only(tmp_path):
    transfer = take(make_bundle(tmp_path, make_spec()), make_spec(tokenizer=WordTokenizer(["<blank>", "a", "b"])))
    assert transfer.outputs == {"kept": 1, "new": 2, "left_out": 3}


@pytest.mark.parametrize(("mine", "kept"), [("one", 5), ("other", 0)])
def test_tied_states_are_kept_if_the_same_model_defines_them(tmp_path, mine, kept):
    def states(model):
        return TiedStates(model=model, frame_shift_ms=20.0, log_priors=(0.0,) * 5)

    transfer = take(make_bundle(tmp_path, make_spec(states=states("one"))), make_spec(states=states(mine)))
    assert transfer.outputs == {"kept": kept, "new": 5 - kept, "left_out": 5 - kept}
    assert transfer.new == (() if kept else ("output.weight", "output.bias"))


def test_more_or_fewer_layers_are_new_or_left_out(tmp_path):
    def deep(layers):
        return make_spec(model=MODELS["conformer"].model_validate({**MODELS["conformer"].tiny, "layers": layers}))

    transfer = take(make_bundle(tmp_path / "two", deep(2)), deep(1))
    assert transfer.new == ()
    assert transfer.left_out
    assert all(name.startswith("layers.1.") for name in transfer.left_out)
    transfer = take(make_bundle(tmp_path / "one", deep(1)), deep(2))
    assert transfer.left_out == ()
    assert all(name.startswith("layers.1.") for name in transfer.new)
    summary = transfer.summary()
    assert summary["taken"] + len(summary["new"]) == len(transfer.weights)
    assert summary["taken_weights"] == sum(transfer.weights[name].numel() for name in transfer.taken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "blstm"}, "is a conformer, and model.kind is blstm: set model.kind=conformer"),
        (
            {"model": MODELS["conformer"](dim=24, layers=1, subsampling=2, channels=4)},
            "model.dim is 24, and there 16.*--set model.dim=16",
        ),
        (
            {"features": LogMelConfig(num_mels=20, cmvn="none")},
            "features.num_mels is 20, and there 16.*--set features.num_mels=16",
        ),
        ({"features": LogMelConfig(num_mels=16, cmvn="utterance")}, "features.cmvn is utterance, and there none"),
        ({"sample_rate": 16000}, "data.sample_rate is 16000, and there 8000.*--set data.sample_rate=8000"),
    ],
)
def test_mismatch_is_refused_with_what_differs_and_the_remedy(tmp_path, change, message):
    source = make_bundle(tmp_path, make_spec())
    with pytest.raises(SourceError, match=f"models:/m/3 .*{message}"):
        take(source, make_spec(**change))


def test_every_field_that_differs_is_named(tmp_path):
    spec = make_spec(sample_rate=16000, features=LogMelConfig(num_mels=20, cmvn="none"))
    with pytest.raises(SourceError, match=r"--set features.num_mels=16 --set data.sample_rate=8000"):
        check_source(make_bundle(tmp_path, make_spec()), spec, "m")


def test_what_a_training_does_not_take_changes_no_digest(tmp_path):
    plain = make_bundle(tmp_path / "plain", make_spec())
    trained = make_bundle(tmp_path / "trained", make_spec(provenance={"run": "another"}))
    other = make_bundle(tmp_path / "other", make_spec(tokenizer=CharacterTokenizer(["<blank>", "a", "b", "d"])))
    assert plain.digest == trained.digest != other.digest


def test_a_folder_without_a_model_is_refused_by_its_name(tmp_path):
    with pytest.raises(SourceError, match=r"s3://a/b is no model: it has no bundle.json"):
        open_source(tmp_path, "s3://a/b")


def test_damaged_weights_are_refused(tmp_path):
    make_bundle(tmp_path, make_spec())
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        open_source(tmp_path)


def test_initial_weights_that_have_changed_are_not_used(tmp_path):
    spec, store = make_spec(), ObjectStore(str(tmp_path / "output"))
    initial = save_initial(take(make_bundle(tmp_path / "bundle", spec), spec), store)
    other = InitialWeights(url=initial.url, sha256="0" * 64)
    with pytest.raises(SourceError, match="not what the training began with"):
        other.read()
