"""Networks that read tokens beside frames are trained as acoustic models are: by each strategy, and in part."""

from itertools import product

import pytest
import torch
from support import load_beside
from tones import bare, train, train_here

from recognition.bundle import load_bundle
from recognition.initial_weights import open_source, save_initial, transfer_weights
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionSystem
from recognition.systems.transducer import TransducerSystem
from speech.models import StatelessPredictorConfig, TransformerDecoderConfig
from storage.objects import ObjectStore
from training.learner.compute import Learner
from training.strategies.registry import STRATEGIES, STRATEGY_CONFIGS

compared = load_beside(__file__, "test_comparison_strategies.py")

SYSTEMS = {
    "attention": AttentionSystem(decoder_network=TransformerDecoderConfig(dim=16, layers=1, heads=2)),
    "transducer": TransducerSystem(predictor=StatelessPredictorConfig(dim=16), joint_dim=16, ctc=True),
}
FROZEN = ("encoder.subsampling.", "encoder.layers.0.")
NEW = {"attention": ("decoder.",), "transducer": ("predictor.", "joiner.")}
FAST = ("transducer", "adpsgd")
WHOLE = [kind for kind, config in STRATEGY_CONFIGS.items() if not config.traits.split]


@pytest.fixture(params=SYSTEMS)
def kind(request):
    return request.param


def layout(strategy):
    """A strategy with as few learners as it needs."""
    nodes, ranks = compared.learners(strategy) if strategy in STRATEGIES else (1, 1)
    fields = STRATEGY_CONFIGS[strategy].model_fields
    constants = {name: value for name, value in compared.CONSTANTS.items() if name in fields}
    return {"strategy": {"kind": strategy, **constants}, "nodes": nodes, "learners_per_node": ranks}


def warm_job(corpus, folder, kind, **changes):
    """A training that begins with a CTC model's encoder."""
    ctc = corpus.spec("conformer", model=bare("conformer"))
    ctc.save(folder / "ctc", dict(ctc.build_model().state_dict()))
    spec = ctc.model_copy(update={"system": SYSTEMS[kind]})
    transfer = transfer_weights(open_source(folder / "ctc"), spec, spec.build_model())
    initial = save_initial(transfer, ObjectStore(str(folder / "source")))
    options = {"objective": kind, "init": "another", "initial": initial, "epochs": 1, "max_batch": 6, "average": 1}
    return corpus.job(folder, spec=spec, **(options | changes))


def moved(job, run):
    """Names of the parameters that training has changed, and of those that it has not."""
    learner = Learner(job, torch.device("cpu"))
    before, after = learner.initial.whole(learner.state()), load_bundle(run.bundle)[1].state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    return changed, after.keys() - changed


def check_frozen(job, run):
    changed, unchanged = moved(job, run)
    assert unchanged == {name for name in changed | unchanged if name.startswith(FROZEN)}
    result = run.result
    assert result["trained_parameters"] < result["parameters"]
    assert result["utterances"] - result["repeated"] <= 48 <= result["utterances"]
    assert Recognizer.load(run.bundle).spec.system == job.task.spec.system


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(kind, strategy, marks=[] if (kind, strategy) == FAST else pytest.mark.slow)
        for kind, strategy in product(SYSTEMS, WHOLE)
    ],
)
def test_each_strategy_trains_all_but_what_is_frozen(corpus, tmp_path, kind, strategy):
    job = warm_job(corpus, tmp_path, kind, freeze=[{"names": [f"{part}*" for part in FROZEN]}], **layout(strategy))
    check_frozen(job, train(job))


def test_one_learner_trains_all_but_what_is_frozen(corpus, tmp_path, kind):
    job = warm_job(corpus, tmp_path, kind, freeze=[{"names": [f"{part}*" for part in FROZEN]}])
    check_frozen(job, train_here(job))


def check_adapted(kind, job, run):
    changed, unchanged = moved(job, run)
    new = {name for name in changed | unchanged if name.startswith(NEW[kind])}
    assert new <= changed
    assert changed - new
    assert all(".attention." in name for name in changed - new)


def test_adapters_of_the_encoder_are_trained_beside_what_is_new(corpus, tmp_path, kind):
    lora = {"rank": 2, "alpha": 4, "modules": ["encoder.*attention*"]}
    job = warm_job(corpus, tmp_path, kind, lora=lora)
    check_adapted(kind, job, train_here(job))


@pytest.mark.slow
def test_learners_of_a_pruned_training_average_adapters_and_what_is_new(corpus, tmp_path):
    """The simple joiner is averaged as all weights are, and no bundle has it."""
    lora, objective = {"rank": 2, "modules": ["encoder.*attention*"]}, {"kind": "transducer", "prune_range": 2}
    job = warm_job(corpus, tmp_path, "transducer", lora=lora, objective=objective, **layout("adpsgd"))
    assert any(name.startswith("simple.") for name, _ in Learner(job, torch.device("cpu")).model.named_parameters())
    check_adapted("transducer", job, train(job))
