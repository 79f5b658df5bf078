"""What is trained of a network: frozen parameters, adapters, learning rates of layers, averages, micro-batches."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tones import TINY, train, train_here, with_task

from recognition.bundle import load_bundle
from recognition.initial_weights import Transfer, save_initial
from speech.models import MODELS
from speech.models.networks.lstm import run_lstm, step_lstm
from speech.models.networks.tdnn import semi_orthogonal_step
from storage.objects import ObjectStore
from training.config import AdamWConfig, TrainConfig
from training.learner.compute import Learner, open_set
from training.learner.flat import FlatParameters, MovingAverage, split_average
from training.learner.optim import Rate, build_optimizer, set_learning_rate
from training.learner.task import WarmTask
from training.learner.trained import trained_network

LORA = {"rank": 2, "alpha": 4}
CPU = torch.device("cpu")


def network(kind, features=16, outputs=7):
    torch.manual_seed(3)
    return TINY[kind].build(features, outputs).eval()


def config(**train):
    return TrainConfig.model_validate({"epochs": 4, **train})


@pytest.fixture(params=list(MODELS))
def kind(request):
    return request.param


@pytest.fixture
def feats():
    return torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([24, 17])


# --- adapters


def test_adapters_begin_as_nothing_and_are_merged_without_changing_outputs(kind, feats):
    plain = network(kind)
    before, _ = plain(*feats)
    trained = trained_network(copy.deepcopy(plain), config(lora=LORA), new=())
    torch.testing.assert_close(trained.network(*feats)[0], before, rtol=0, atol=1e-6)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained.network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted, _ = trained.network(*feats)
    assert (adapted - before).abs().max() > 0.01
    merged = network(kind)
    merged.load_state_dict(trained.whole(trained.network.state_dict()))
    torch.testing.assert_close(merged(*feats)[0], adapted, rtol=0, atol=1e-5)


def test_flat_buffer_holds_adapters_only():
    trained = trained_network(network("conformer"), config(lora=LORA | {"modules": ["*attention*"]}), new=())
    flat = FlatParameters(trained.network)
    assert flat.weights.numel() == trained.num_trained == sum(p.numel() for p in trained.network.parameters())
    assert all("attention" in name and ".lora_" in name for name in flat.names)
    assert set(trained.network.state_dict()) == set(flat.names)
    assert trained.num_weights == sum(p.numel() for p in network("conformer").parameters())


def test_whatever_reads_the_weight_of_an_adapted_layer_gets_the_adapted_one():
    trained = trained_network(network("conformer"), config(lora=LORA), new=()).network
    layer = trained.output
    assert isinstance(layer, torch.nn.Linear)
    with torch.no_grad():
        layer.lora_b.fill_(1.0)
    x = torch.ones(1, layer.in_features)
    assert torch.equal(torch.nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    expected = layer._buffers["weight"] + 2.0 * (layer.lora_b @ layer.lora_a)
    assert torch.equal(layer.weight, expected)


def test_each_weight_of_an_lstm_that_is_not_frozen_gets_an_adapter_with_its_layers_rate():
    lora, frozen = LORA | {"modules": ["lstm"]}, [{"names": ["lstm.weight_hh*"]}]
    plain = network("blstm")
    trained = trained_network(copy.deepcopy(plain), config(lora=lora, freeze=frozen, layer_decay=0.5), new=())
    weights = [name for name, _ in plain.named_parameters() if name.startswith("lstm.weight_ih")]
    assert len(weights) == 2 * plain.cfg.layers
    names = dict(trained.network.named_parameters())
    assert set(names) == {f"{name}_{factor}" for name in weights for factor in ("lora_a", "lora_b")}
    last = plain.cfg.layers - 1
    assert trained.rates[names[f"lstm.weight_ih_l{last}_reverse_lora_b"]] == Rate(0.5)
    assert trained.rates[names["lstm.weight_ih_l0_lora_a"]] == Rate(0.5 ** (last + 1))


def test_an_adapted_lstm_computes_the_same_by_frames_as_at_once(feats):
    lstm = trained_network(network("lstm"), config(lora=LORA | {"modules": ["lstm"]}), new=()).network.lstm
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.fill_(0.1)
        x = torch.randn(2, 5, lstm.input_size)
        whole = run_lstm(lstm, x, None)
        memory = (torch.zeros(2, lstm.num_layers, lstm.hidden_size),) * 2
        frames = []
        for frame in x.unbind(1):
            output, memory = step_lstm(lstm, frame, memory)
            frames.append(output)
    torch.testing.assert_close(torch.stack(frames, 1), whole)


def test_new_parameters_are_trained_in_full_beside_adapters():
    trained = trained_network(network("conformer"), config(lora=LORA, new_lr=5), new=("output.weight", "output.bias"))
    names = dict(trained.network.named_parameters())
    assert {"output.weight", "output.bias"} <= set(names)
    assert "output.lora_a" not in names
    assert trained.rates[names["output.weight"]] == Rate(5.0)
    assert {trained.rates[p] for name, p in names.items() if "lora" in name} == {Rate(5.0)}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"lora": {"modules": ["*attn*"]}}, r"lora.modules: '\*attn\*' matches no layer; .*layers\.\*\.attention\.out"),
        ({"freeze": [{"names": ["layer.0.*"]}]}, r"freeze.0.names: 'layer.0.\*' matches no parameter; there are sub"),
        ({"freeze": [{"names": ["*"]}]}, "leaves no parameter that is trained in the first epoch"),
        ({"freeze": [{"names": ["*"], "until": 1}]}, "leaves no parameter that is trained in the first epoch"),
    ],
)
def test_patterns_without_effect_are_refused_with_the_names_that_exist(train, message):
    with pytest.raises(ValueError, match=message):
        trained_network(network("conformer"), config(**train), new=())


def test_adapters_without_another_models_weights_are_refused():
    with pytest.raises(ValueError, match="matches only layers that are new or frozen; none can be adapted"):
        trained_network(network("conformer"), config(lora=LORA))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"lora": LORA, "freeze": [{"names": ["*"], "until": 1}]}, "none of these thaw"),
        ({"freeze": [{"names": ["*"], "until": 4}]}, "would never be trained"),
        ({"lora": LORA, "strategy": "pipeline", "learners_per_node": 2}, "lora needs the whole model, which pipeline"),
        ({"ema": 0.9, "strategy": "pipeline", "learners_per_node": 2}, "ema needs the whole model"),
        ({"accumulate": 2, "strategy": "pipeline", "learners_per_node": 2}, "strategy.micro_batches"),
        ({"freeze": [{"names": ["*"], "until": 1}], "strategy": "asgd", "nodes": 2}, "makes updates at a server"),
        ({"ema": 0.9, "strategy": "asgd", "nodes": 2}, "makes updates at a server"),
        ({"final": "ema"}, "set ema, to 0.999"),
    ],
)
def test_what_cannot_be_combined_is_refused(train, message):
    with pytest.raises(ValueError, match=message):
        config(**train)


# --- learning rates


def test_learning_rates_fall_from_layer_to_layer():
    model = MODELS["conformer"](dim=16, layers=3, heads=2, channels=4, subsampling=2).build(16, 7)
    trained = trained_network(model, config(layer_decay=0.5, new_lr=3.0), new=("output.bias",))
    scales = {name: trained.rates.get(p, Rate()).scale for name, p in trained.network.named_parameters()}
    assert scales["output.weight"] == 1.0
    assert scales["output.bias"] == 3.0
    assert [scales[f"layers.{number}.norm.weight"] for number in (2, 1, 0)] == [0.5, 0.25, 0.125]
    assert {scale for name, scale in scales.items() if name.startswith("subsampling.")} == {0.0625}


def test_an_adapter_has_the_rate_of_its_layer():
    trained = trained_network(network("conformer"), config(layer_decay=0.5, lora=LORA), new=())
    scales = {name: trained.rates.get(p, Rate()).scale for name, p in trained.network.named_parameters()}
    assert scales["output.lora_a"] == 1.0
    assert scales["layers.0.attention.out.lora_b"] == 0.5
    assert scales["subsampling.project.lora_a"] == 0.25


def test_a_step_moves_each_parameter_by_its_own_rate():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    rates = {model[0].weight: Rate(0.25), model[1].bias: Rate(1.0, 3)}
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.5), model, rates)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_learning_rate(optimizer, 0.1, epoch=2)
    optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert torch.equal(moved["1.bias"], torch.zeros(2))
    torch.testing.assert_close(moved["0.bias"], torch.full((2,), 0.1))
    torch.testing.assert_close(moved["0.weight"], 0.025 * (1 + 0.5 * before["0.weight"]))
    torch.testing.assert_close(moved["1.weight"], 0.1 * (1 + 0.5 * before["1.weight"]))


# --- frozen parameters in training

FROZEN = ["subsampling.*", "layers.0.feed_forward_in.*"]
ALONE = ["single", "scpsgd", "sdpsgd", "adpsgd", "h-adpsgd", "ma", "bmuf", "onebit"]
"""Strategies that one learner can train by."""


def matching(name):
    return name.startswith(tuple(pattern.removesuffix("*") for pattern in FROZEN))


def initial_weights(job):
    learner = Learner(job, CPU)
    return learner.initial.whole(learner.state())


def warm(job):
    """A job that begins with another model's weights, all of which it takes."""
    plain = job.model_copy(update={"train": job.train.model_copy(update={"lora": None})})
    trained = Learner(plain, CPU).initial
    with torch.no_grad():
        for parameter in trained.network.parameters():
            parameter.add_(0.01)
    transfer = Transfer(trained.whole(trained.network.state_dict()), trained.names)
    return with_task(job, initial=save_initial(transfer, ObjectStore(str(job.journal.parent / "source"))))


def assert_frozen(job, run):
    before, after = initial_weights(job), load_bundle(run.bundle)[1].state_dict()
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == matching(name), name


@pytest.mark.parametrize("strategy", ALONE)
def test_frozen_weights_stay_bit_for_bit_with_each_strategy(corpus, tmp_path, strategy):
    job = corpus.job(tmp_path, "conformer", strategy=strategy, epochs=1, freeze=[{"names": FROZEN}])
    assert_frozen(job, train_here(job))


@pytest.mark.parametrize(
    "strategy", ["adpsgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("asgd", "hogwild"))]
)
def test_frozen_weights_stay_bit_for_bit_with_several_learners(corpus, tmp_path, strategy):
    rates = {"layer_decay": 0.8, "epochs": 1, "freeze": [{"names": FROZEN}]}
    job = corpus.job(tmp_path, "conformer", strategy=strategy, nodes=2, **rates)
    run = train(job)
    assert_frozen(job, run)
    assert run.result["trained_parameters"] < run.result["parameters"]


def test_frozen_weights_are_not_saved_with_checkpoints(corpus, tmp_path):
    job = corpus.job(tmp_path, "conformer", epochs=1, freeze=[{"names": FROZEN}])
    train_here(job)
    saved = [load_file(path) for path in (tmp_path / "output").glob("*/*/**/model.safetensors")]
    assert saved
    assert not any(matching(name) for weights in saved for name in weights)


def test_constrained_weights_that_are_frozen_do_not_change(corpus, tmp_path):
    job = corpus.job(tmp_path, "tdnn", epochs=1, freeze=[{"names": ["layers.*.linear.*"]}])
    learner = Learner(job, CPU)
    name = next(name for name in learner.initial.constants if name.endswith("linear.weight"))
    before = learner.initial.whole(learner.state())[name].clone()
    assert not torch.equal(semi_orthogonal_step(before), before)
    learner.model.constrain()
    assert torch.equal(learner.initial.whole(learner.state())[name], before)


@pytest.mark.parametrize("optimizer", [{"kind": "adamw", "lr": 5e-3}, {"kind": "sgd", "lr": 0.05}])
def test_parameters_thaw_after_their_epochs(corpus, tmp_path, optimizer):
    def job(name):
        freeze = [{"names": FROZEN, "until": 1}]
        return corpus.job(tmp_path / name, "conformer", epochs=2, freeze=freeze, optimizer=optimizer)

    def unchanged(weights):
        return {
            frozen: {torch.equal(weights[name], before[name]) for name in before if matching(name) == frozen}
            for frozen in (True, False)
        }

    before, whole = initial_weights(job("whole")), train_here(job("whole"))
    steps = len(whole.losses) // 2
    assert steps > 3
    train_here(job("part"), stop_at=steps - 1)
    part = max((tmp_path / "part" / "output").glob("checkpoints/*/node-000/model.safetensors"))
    assert unchanged(load_file(part)) == {True: {True}, False: {False}}
    assert unchanged(load_bundle(whole.bundle)[1].state_dict())[True] == {False}


@pytest.mark.slow
def test_parameters_thaw_in_nodes_of_several_learners(corpus, tmp_path):
    freeze, kind = [{"names": FROZEN, "until": 1}], {"strategy": "scpsgd", "learners_per_node": 2}
    job = corpus.job(tmp_path, "conformer", epochs=2, freeze=freeze, average=1, checkpoint_steps=1000, **kind)
    before, after = initial_weights(job), load_bundle(train(job).bundle)[1].state_dict()
    assert [name for name, tensor in after.items() if torch.equal(tensor, before[name])] == []


@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.variants(1)
def test_adapters_resume_where_they_stopped(corpus, tmp_path, stop):
    options = {"kind": "conformer", "epochs": 2, "init": "another", "lora": LORA, "new_lr": 4.0, "ema": 0.9}

    def job(folder):
        return warm(corpus.job(folder, **options))

    whole = train_here(job(tmp_path / "whole"))
    train_here(job(tmp_path / "parts"), stop_at=stop)
    resumed = train_here(job(tmp_path / "parts"))
    assert resumed.losses == whole.losses
    assert resumed.model_bytes == whole.model_bytes
    assert resumed.result["history"] == whole.result["history"]


def test_frozen_weights_are_those_that_training_begins_with(corpus, tmp_path):
    job = warm(corpus.job(tmp_path, "conformer", epochs=1, init="another", lora=LORA))
    assert isinstance(job.task, WarmTask)
    learner = Learner(job, CPU)
    assert learner.flat.weights.numel() < 0.5 * learner.initial.num_weights
    run = train_here(job)
    merged, before = load_bundle(run.bundle)[1].state_dict(), job.task.initial.read()
    assert merged.keys() == before.keys()
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name, module in learner.model.named_modules() if hasattr(module, "lora_b")}


# --- moving averages


def test_moving_average_is_that_of_the_published_formula():
    flat = FlatParameters(torch.nn.Linear(2, 1))
    average, expected = MovingAverage(flat, 0.5), flat.weights.clone()
    for step in range(1, 30):
        flat.weights.add_(1.0)
        average.add()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * flat.weights
    torch.testing.assert_close(average.values, expected)
    own, averaged = split_average(average.tensors() | dict(flat.model.state_dict()))
    assert set(own) == set(averaged) == {"weight", "bias"}
    torch.testing.assert_close(averaged["weight"].flatten(), expected[:2])


@pytest.mark.parametrize("final", ["weights", "ema"])
def test_final_model_is_made_of_what_is_chosen(corpus, tmp_path, final):
    job = corpus.job(tmp_path, "conformer", epochs=2, ema=0.8, final=final, checkpoint_keep=100)
    run = train_here(job)
    other = {"weights": "ema", "ema": "weights"}[final]
    assert all(entry["loss"] != entry[f"{other}_loss"] > 0 for entry in run.result["history"])
    assert run.result["averaged_epochs"] == [2]
    last = load_file(sorted((tmp_path / "output").glob("checkpoints/*/node-000/model.safetensors"))[-1])
    chosen = split_average(last)[final == "ema"]
    for name, tensor in load_bundle(run.bundle)[1].state_dict().items():
        assert torch.equal(tensor, chosen[name]), name


# --- micro-batches


def test_micro_batches_add_up_to_the_large_batch(corpus, tmp_path):
    spec = corpus.spec("conformer", model=TINY["conformer"].model_copy(update={"dropout": 0.0}))
    options = {"spec": spec, "epochs": 1, "augment": {"enabled": False}}
    whole = train_here(corpus.job(tmp_path / "whole", **options))
    parts = train_here(corpus.job(tmp_path / "parts", accumulate=4, **options))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    ours, theirs = (load_bundle(run.bundle)[1].state_dict() for run in (parts, whole))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-4)


def test_a_batch_is_divided_into_as_many_micro_batches_as_configured(corpus, tmp_path):
    learner = Learner(corpus.job(tmp_path, "conformer", accumulate=3, augment={"enabled": False}), CPU)
    sizes, backward = [], learner._backward
    learner._backward = lambda batch, seed: (sizes.append(len(batch.ids)), backward(batch, seed))[1]
    data = open_set(learner.job, "train")
    losses = learner.gradient(learner.task.drawn(data.batch(np.arange(8)), 0), 1)
    assert sizes == [3, 3, 2]
    assert (losses.utterances, losses.divided) == (8, 0)
