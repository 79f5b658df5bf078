"""Objectives: what all promise, and what CTC cannot align."""

import math
from types import SimpleNamespace

import pytest
import torch

from speech.decoding import DECODERS
from speech.objectives import OBJECTIVES, Ctc, CtcConfig, build_objective, check_decoder
from speech.objectives.ctc import needed_frames


def token_batch(tokens, lengths):
    return SimpleNamespace(tokens=torch.tensor(tokens), token_lengths=torch.tensor(lengths))


# --- what every objective promises


@pytest.fixture(params=sorted(OBJECTIVES))
def objective(request):
    return build_objective(OBJECTIVES[request.param].config())


def test_the_configuration_knows_all_objectives():
    assert {one.config().kind: one for one in OBJECTIVES.values()} == OBJECTIVES


def test_decoders_that_read_it_exist(objective):
    assert any(decoder.reads == objective.outputs for decoder in DECODERS.values())


def test_another_decoder_is_refused_with_those_that_fit(monkeypatch):
    monkeypatch.setattr(DECODERS["beam"], "reads", "frames")
    check_decoder(CtcConfig(), "greedy")
    with pytest.raises(ValueError, match=r"decode\.kind is beam, .* trained with ctc say: use greedy"):
        check_decoder(CtcConfig(), "beam")


def test_losses_of_a_batch_are_those_of_its_parts_and_can_be_minimized(objective):
    scores = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens, lengths, frames = [[1, 2, 3], [4, 1, 0], [2, 0, 0]], [3, 2, 1], torch.tensor([8, 6, 5])
    losses, _ = objective.losses(scores.log_softmax(-1), frames, token_batch(tokens, lengths))
    for row in range(3):
        part = token_batch([tokens[row][: lengths[row]]], [lengths[row]])
        alone, _ = objective.losses(scores[row : row + 1, : frames[row]].log_softmax(-1), frames[row : row + 1], part)
        torch.testing.assert_close(alone[0], losses[row])
    losses.sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[2, 5:].any()  # behind the utterance's end
    better = scores.detach() - 0.1 * scores.grad
    again, _ = objective.losses(better.log_softmax(-1), frames, token_batch(tokens, lengths))
    assert again.sum() < losses.sum()


def test_items_add_up(objective):
    one, two = token_batch([[1, 2, 3]], [3]), token_batch([[4, 1]], [2])
    both = token_batch([[1, 2, 3], [4, 1, 0]], [3, 2])
    assert objective.items(both) == objective.items(one) + objective.items(two) > 0


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
