"""Objectives: the contract of all, and utterances that CTC cannot align."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import ctc_loss

from speech.objectives import (
    OBJECTIVES,
    Ctc,
    CtcConfig,
    FrameCrossEntropy,
    FrameCrossEntropyConfig,
    build_objective,
)
from speech.objectives.base import NO_STATE
from speech.objectives.ctc import needed_frames
from speech.objectives.ctc_on_gpu import CtcWithGradient

STATES = [[4, 4, 0, 1, 1, 2, 3, 3], [1, 1, 2, 2, 2, 0], [3, 0, 0, 1, 4]]


def state_batch(states, factor=1):
    """Targets of tied states, a list for each utterance."""
    rows = [torch.tensor(states_of_utterance, dtype=torch.int32) for states_of_utterance in states]
    return SimpleNamespace(
        states=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NO_STATE),
        state_lengths=torch.tensor([len(states_of_utterance) for states_of_utterance in states]),
        frame_factor=factor,
    )


def token_batch(tokens, lengths, states=STATES[:1]):
    tokens = {"tokens": torch.tensor(tokens), "token_lengths": torch.tensor(lengths)}
    return SimpleNamespace(**tokens, **vars(state_batch(states)))


# --- what every objective promises


@pytest.fixture(
    params=sorted(OBJECTIVES.keys() - {"attention", "transducer"})
)  # whose outputs have two parts, see their own tests
def objective(request):
    return build_objective(OBJECTIVES[request.param]())


def test_configuration_accepts_every_objective():
    assert {objective().kind: objective for objective in OBJECTIVES.values()} == OBJECTIVES


def test_batch_losses_equal_those_of_its_parts_and_can_be_minimized(objective):
    scores = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens, lengths, frames = [[1, 2, 3], [4, 1, 0], [2, 0, 0]], [3, 2, 1], torch.tensor([8, 6, 5])
    losses, _ = objective.losses(scores.log_softmax(-1), frames, token_batch(tokens, lengths, STATES))
    for row in range(3):
        part = token_batch([tokens[row][: lengths[row]]], [lengths[row]], STATES[row : row + 1])
        alone, _ = objective.losses(scores[row : row + 1, : frames[row]].log_softmax(-1), frames[row : row + 1], part)
        torch.testing.assert_close(alone[0], losses[row])
    losses.sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[2, 5:].any()  # behind the utterance's end
    better = scores.detach() - 0.1 * scores.grad
    again, _ = objective.losses(better.log_softmax(-1), frames, token_batch(tokens, lengths, STATES))
    assert again.sum() < losses.sum()


def test_item_counts_add_up(objective):
    first, two = token_batch([[1, 2, 3]], [3], STATES[:1]), token_batch([[4, 1]], [2], STATES[1:2])
    both = token_batch([[1, 2, 3], [4, 1, 0]], [3, 2], STATES[:2])
    assert objective.items(both) == objective.items(first) + objective.items(two) > 0


# --- CTC


def test_needed_frames_counts_a_blank_between_equal_tokens():
    batch = token_batch([[1, 2, 3, 0], [1, 1, 1, 0], [2, 0, 0, 0], [3, 3, 2, 2]], [3, 3, 1, 4])
    assert needed_frames(batch.tokens, batch.token_lengths).tolist() == [3, 5, 1, 6]


def test_ctc_is_the_sum_over_all_alignments():
    """Two frames, one token: of the paths (a, a), (a, blank), (blank, a)."""
    probabilities = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]])
    loss, unalignable = Ctc(CtcConfig()).losses(probabilities.log(), torch.tensor([2]), token_batch([[1]], [1]))
    assert loss.item() == pytest.approx(-math.log(0.4 * 0.7 + 0.4 * 0.3 + 0.6 * 0.7))
    assert unalignable == 0


def test_the_frame_limit_of_ctc_is_exact():
    uniform = torch.full((2, 3, 3), 1 / 3).log()
    batch = token_batch([[1, 1], [1, 2]], [2, 2])
    loss, unalignable = Ctc(CtcConfig()).losses(uniform, torch.tensor([2, 2]), batch)
    assert unalignable == 1
    assert loss[0] == 0.0
    assert loss[1] > 0
    assert Ctc(CtcConfig()).losses(uniform, torch.tensor([3, 2]), batch)[1] == 0


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.3, 0.0, 2.0]])
def test_gradient_that_comes_with_the_losses_is_that_of_torch(weights):
    """The third utterance cannot be aligned."""
    targets = torch.tensor([[1, 2, 3], [4, 1, 0], [2, 2, 2]]), torch.tensor([8, 6, 4]), torch.tensor([3, 2, 3])
    results = []
    for compute in (CtcWithGradient.apply, partial(ctc_loss, reduction="none", zero_infinity=True)):
        outputs = random_outputs(8, 3).log_softmax(-1).requires_grad_()
        losses = compute(outputs, *targets)
        (losses * torch.tensor(weights)).sum().backward()
        results.append((losses.detach(), outputs.grad))
    assert all(torch.equal(value, other) for value, other in zip(*results, strict=True))
    assert losses[2] == 0


# --- frame cross-entropy


def random_outputs(batch=3, frames=8, states=5, seed=1):
    return torch.randn(batch, frames, states, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_frame_cross_entropy_equals_torch(smoothing):
    scores, frames = random_outputs(), torch.tensor([8, 6, 5])
    objective = FrameCrossEntropy(FrameCrossEntropyConfig(label_smoothing=smoothing))
    losses, unalignable = objective.losses(scores.log_softmax(-1), frames, state_batch(STATES))
    expected = [
        torch.nn.functional.cross_entropy(
            row[: len(states)], torch.tensor(states), reduction="sum", label_smoothing=smoothing
        )
        for row, states in zip(scores, STATES, strict=True)
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    assert unalignable == 0
    assert objective.items(state_batch(STATES)) == 8 + 6 + 5


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_output_frame_corresponds_to_every_nth_aligned_frame(factor):
    states = STATES[0]
    kept = states[::factor]
    scores = random_outputs(1, len(kept))
    objective = FrameCrossEntropy(FrameCrossEntropyConfig())
    losses, _ = objective.losses(scores.log_softmax(-1), torch.tensor([len(kept)]), state_batch([states], factor))
    expected = torch.nn.functional.cross_entropy(scores[0], torch.tensor(kept), reduction="sum")
    torch.testing.assert_close(losses[0], expected)
    assert objective.items(state_batch([states], factor)) == len(kept)


def test_utterance_without_alignment_is_counted_and_has_no_loss():
    objective = FrameCrossEntropy(FrameCrossEntropyConfig())
    scores = random_outputs().requires_grad_()
    targets = state_batch([STATES[0], [], STATES[2]])
    losses, unalignable = objective.losses(scores.log_softmax(-1), torch.tensor([8, 6, 5]), targets)
    assert unalignable == 1
    assert losses[1] == 0
    losses.sum().backward()
    assert not scores.grad[1].any()
    assert objective.items(targets) == 8 + 5


def test_alignment_may_differ_from_the_output_by_a_few_frames_only():
    objective = FrameCrossEntropy(FrameCrossEntropyConfig())

    def losses(num_states, num_frames, factor=1):
        outputs = random_outputs(1, num_frames).log_softmax(-1)
        return objective.losses(outputs, torch.tensor([num_frames]), state_batch([[1] * num_states], factor))

    assert losses(15, 20)[1] == losses(20, 15)[1] == 0
    assert losses(15, 20)[0] > 0
    assert losses(14, 20)[1] == losses(20, 14)[1] == 1
    assert losses(14, 20)[0] == 0
    assert losses(20, 6, 4)[1] == 0
    assert losses(20, 7, 4)[1] == 1


def test_frames_without_state_do_not_count():
    objective = FrameCrossEntropy(FrameCrossEntropyConfig())
    scores, states = random_outputs(1), [NO_STATE, NO_STATE, 0, 1, 1, 2, NO_STATE, NO_STATE]
    losses, unalignable = objective.losses(scores.log_softmax(-1), torch.tensor([8]), state_batch([states]))
    expected = torch.nn.functional.cross_entropy(scores[0, 2:6], torch.tensor(states[2:6]), reduction="sum")
    torch.testing.assert_close(losses[0], expected)
    assert (unalignable, objective.items(state_batch([states]))) == (0, 4)


def test_frame_accuracy_is_the_share_of_frames_whose_best_state_is_right():
    objective = FrameCrossEntropy(FrameCrossEntropyConfig())
    outputs = torch.nn.functional.one_hot(torch.tensor([[4, 4, 0, 1, 2, 2, 3, 0]]), 5).float()
    assert objective.figures(outputs, torch.tensor([8]), state_batch(STATES[:1])) == {"frame_accuracy": (6.0, 8)}
