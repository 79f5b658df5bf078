"""Operations of a training step that the host launches, counted on a CPU: with `train.flat_bf16`, and without.

    python -m benchmarks.operations [--kind conformer]

Forward pass under autocast to bf16 and backward pass, without features, loss and update, of the Conformer of
`benchmarks.gpu` or of another kind's default. Operations that only make views are left out, since a GPU has nothing to
do for them; so is dropout, which takes other operations on a CPU than on a GPU.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import CONFORMER
from speech.models import MODELS, build_model
from training.learner.bf16_weights import Bf16Weights
from training.learner.flat import FlatParameters

CONVERSION = "aten::_to_copy"


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched, without those that only make views.

    Attributes:
        counts: By torch's name, such as "aten::mm".
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def backward(
    model: torch.nn.Module, feats_BTF: Tensor, lengths: Tensor, weights: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """Add the gradients of the sum of a model's scores; returns the scores."""
    with weights(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores: Tensor = model(feats_BTF, lengths)[0]
    scores.sum().backward()  # type: ignore[no-untyped-call]
    return scores.detach()


def count(model: torch.nn.Module, num_features: int, flat_bf16: bool) -> Counter[str]:
    """Count the operations of a step of a model of `num_features`; its parameters become flat."""
    flat = FlatParameters(model)
    weights = Bf16Weights(flat).in_use if flat_bf16 else nullcontext
    with Operations() as operations:
        backward(model, torch.zeros(2, 64, num_features), torch.tensor([64, 50]), weights)
    return operations.counts


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", default="conformer", choices=list(MODELS))
    args = parser.parse_args(argv)
    sizes: dict[str, Any] = CONFORMER if args.kind == "conformer" else {}
    for flat_bf16 in (False, True):
        config = MODELS[args.kind].model_validate({**sizes, "dropout": 0.0})
        counts = count(build_model(config, 80, 200), 80, flat_bf16)
        most = ", ".join(f"{name.removeprefix('aten::')} {number}" for name, number in counts.most_common(6))
        print(
            f"flat_bf16={str(flat_bf16).lower()}: {counts.total():,} operations, {counts[CONVERSION]} of them "
            f"conversions ({most})"
        )


if __name__ == "__main__":
    main()
