"""Transducer loss: the sum over all alignments, its gradient, joint training with CTC, and what is counted."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import ctc_loss
from torchaudio.functional import rnnt_loss

from speech.objectives import JointTransducer, TransducerConfig
from speech.objectives.transducer import (
    band_starts,
    band_width,
    joint_lattice,
    parted_lattice,
    spread_band,
    transducer_losses,
)

FRAMES, LENGTHS, VOCAB = (6, 4, 5, 2), (3, 1, 0, 3), 4
TOKENS = torch.tensor([[1, 2, 2], [3, 0, 0], [0, 0, 0], [1, 1, 3]])


def targets():
    return SimpleNamespace(tokens=TOKENS, token_lengths=torch.tensor(LENGTHS))


def scores(seed=0, frames=FRAMES, vocab=VOCAB):
    """Unnormalized scores of a joiner [batch, frames, tokens + 1, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(len(frames), max(frames), TOKENS.shape[1] + 1, vocab, generator=generator)


def lattice_of(joined, tokens=TOKENS):
    """Log probabilities of the blank and of the next token."""
    log_probs = joined.log_softmax(-1)
    following = torch.nn.functional.pad(tokens, (0, 1))[:, None, :, None].expand(-1, joined.shape[1], -1, -1)
    return torch.cat((log_probs[..., :1], log_probs.gather(3, following)), dim=3)


def enumerated(log_probs, tokens):
    """Negative log probability of a text: the sum over all paths, one by one; log_probs [frames, tokens + 1, vocab]."""

    def ways(frame, place):
        if frame == len(log_probs):
            return [0.0] if place == len(tokens) else []
        said = [float(log_probs[frame, place, 0]) + rest for rest in ways(frame + 1, place)]
        if place < len(tokens):
            said += [float(log_probs[frame, place, tokens[place]]) + rest for rest in ways(frame, place + 1)]
        return said

    return -float(torch.logsumexp(torch.tensor(ways(0, 0), dtype=torch.float64), 0))


def by_forward_variables(log_probs, tokens):
    """As `enumerated`, by the recursion over frames and tokens (Graves 2012, section 2.4), with a gradient."""
    before = {}
    for frame in range(len(log_probs)):
        for place in range(len(tokens) + 1):
            ways = []
            if frame:
                ways.append(before[frame - 1, place] + log_probs[frame - 1, place, 0])
            if place:
                ways.append(before[frame, place - 1] + log_probs[frame, place - 1, tokens[place - 1]])
            before[frame, place] = torch.logsumexp(torch.stack(ways), 0) if ways else torch.tensor(0.0).double()
    return -(before[len(log_probs) - 1, len(tokens)] + log_probs[-1, len(tokens), 0])


def text(row):
    return TOKENS[row, : LENGTHS[row]].tolist()


def test_loss_is_the_sum_over_all_paths():
    joined = scores()
    losses, unalignable = JointTransducer(TransducerConfig()).losses(
        joint_lattice(None, lattice_of(joined)), torch.tensor(FRAMES), targets()
    )
    assert unalignable == 0
    for row, count in enumerate(FRAMES):
        log_probs = joined[row, :count].double().log_softmax(-1)
        assert float(losses[row]) == pytest.approx(enumerated(log_probs, text(row)), rel=1e-6)


def test_probabilities_of_all_texts_add_up_to_one():
    """Of tokens that the last frame never says, so that no text is endless."""
    joined = scores(3, (2,), 3).log_softmax(-1)
    joined[:, -1] = torch.tensor([0.0, -1e4, -1e4])
    joined[:, :, -1] = torch.tensor([0.0, -1e4, -1e4])
    total = 0.0
    for number in range(3**3):
        tokens = [number // 9 % 3, number // 3 % 3, number % 3]
        own = [token for token in tokens if token]
        if tokens == own + [0] * (3 - len(own)):
            total += math.exp(-enumerated(joined[0], own))
    assert total == pytest.approx(1, abs=1e-6)


def test_gradient_is_that_of_the_recursion_in_float64():
    weights = torch.tensor([1.0, 0.3, 2.0, 1.5])
    joined = scores(1).requires_grad_()
    losses = transducer_losses(lattice_of(joined), torch.tensor(FRAMES), torch.tensor(LENGTHS))
    (losses * weights).sum().backward()
    reference = scores(1).double().requires_grad_()
    expected = [
        by_forward_variables(reference[row, :count].log_softmax(-1), text(row)) for row, count in enumerate(FRAMES)
    ]
    (torch.stack(expected) * weights).sum().backward()
    torch.testing.assert_close(losses.double(), torch.stack(expected))
    torch.testing.assert_close(joined.grad.double(), reference.grad, atol=1e-6, rtol=1e-5)
    assert not joined.grad[1, 4:].any()  # behind the utterance's end
    assert not joined.grad[1, :, 2:].any()  # behind the text's end


def test_loss_and_gradient_are_torchaudios_of_the_whole_vocabulary():
    results = []
    for whole in (False, True):
        joined = scores(2).requires_grad_()
        if whole:
            lengths = torch.tensor(FRAMES, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
            losses = rnnt_loss(joined, TOKENS.int(), *lengths, blank=0, reduction="none")
        else:
            losses = transducer_losses(lattice_of(joined), torch.tensor(FRAMES), torch.tensor(LENGTHS))
        losses.sum().backward()
        results.append((losses.detach(), joined.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9])
def test_ctc_has_its_share(weight):
    """The last utterance is too short for CTC, which needs a blank between equal tokens."""
    joined, outputs = scores(), torch.randn(4, 6, VOCAB, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    both = joint_lattice(outputs, lattice_of(joined))
    objective = JointTransducer(TransducerConfig(ctc_weight=weight))
    losses, unalignable = objective.losses(both, torch.tensor(FRAMES), targets())
    alone = transducer_losses(lattice_of(joined), torch.tensor(FRAMES), torch.tensor(LENGTHS))
    ctc = ctc_loss(outputs.transpose(0, 1), TOKENS, FRAMES, LENGTHS, reduction="none")
    torch.testing.assert_close(losses[:3], (weight * ctc + (1 - weight) * alone)[:3])
    assert (losses[3], unalignable) == (0, 1)


def test_parts_of_the_outputs_are_those_that_were_joined():
    lattice, posteriors = lattice_of(scores()), torch.zeros(4, 6, VOCAB)
    for given in (None, posteriors):
        ctc, other = parted_lattice(joint_lattice(given, lattice), targets())
        assert torch.equal(other, lattice)
        assert ctc.shape[2] == (0 if given is None else VOCAB)


def test_utterance_without_frames_is_counted_and_has_no_loss():
    joined = scores().requires_grad_()
    frames = torch.tensor([6, 0, 5, 2])
    losses, unalignable = JointTransducer(TransducerConfig()).losses(
        joint_lattice(None, lattice_of(joined)), frames, targets()
    )
    assert (losses[1], unalignable) == (0, 1)
    losses.sum().backward()
    assert not joined.grad[1].any()


def test_frames_that_pad_the_whole_batch_are_ignored():
    """A GPU's batches are padded to few lengths, which torchaudio's function refuses."""
    joined = scores()
    padded = torch.nn.functional.pad(lattice_of(joined), (0, 0, 0, 0, 0, 3), value=math.nan)
    wanted = transducer_losses(lattice_of(joined), torch.tensor(FRAMES), torch.tensor(LENGTHS))
    assert torch.equal(transducer_losses(padded, torch.tensor(FRAMES), torch.tensor(LENGTHS)), wanted)


def test_batches_without_any_frame_or_token_have_losses():
    objective = JointTransducer(TransducerConfig())
    nothing = SimpleNamespace(tokens=torch.zeros(2, 0), token_lengths=torch.tensor([0, 0]))
    lattice = scores()[:2, :, :1].log_softmax(-1)[..., :2]
    losses, unalignable = objective.losses(joint_lattice(None, lattice), torch.tensor([3, 1]), nothing)
    torch.testing.assert_close(losses, torch.stack([-lattice[0, :3, 0, 0].sum(), -lattice[1, 0, 0, 0]]))
    losses, unalignable = objective.losses(joint_lattice(None, lattice[:, :0]), torch.tensor([0, 0]), nothing)
    assert (losses.tolist(), unalignable) == ([0, 0], 2)


def test_values_that_are_no_numbers_make_the_loss_nan():
    lattice = lattice_of(scores())
    lattice[0, 2, 1] = math.nan
    losses = transducer_losses(lattice, torch.tensor(FRAMES), torch.tensor(LENGTHS))
    assert losses.isnan().tolist() == [True, False, False, False]


def test_items_are_tokens():
    assert JointTransducer(TransducerConfig()).items(targets()) == sum(LENGTHS)


# --- bands


def bands(seed=0, width=2, frames=FRAMES, lengths=LENGTHS):
    lattice = lattice_of(scores(seed, frames))
    starts = band_starts(lattice, torch.tensor(frames), torch.tensor(lengths), width)
    return lattice, starts


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [2, 3])
def test_bands_lead_from_the_first_place_to_the_last_one_and_neighbours_overlap(seed, width):
    frames = (6, 4, 5, 3)
    _, starts = bands(seed, width, frames)
    for row, (count, length) in enumerate(zip(frames, LENGTHS, strict=True)):
        own = starts[row].tolist()
        assert own[0] == 0
        assert own[count - 1 :] == [max(0, length + 1 - width)] * (7 - count)
        assert all(0 <= after - before <= width - 1 for before, after in pairwise(own))


def test_bands_have_the_most_probable_alignment():
    """One that stays at the first place for two frames, says two tokens in the third, and one in the last frame."""
    path = [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 2), (5, 2), (5, 3)]
    lattice = torch.full((1, 6, 4, 2), -8.0)
    for (frame, place), (after, _) in zip(path, [*path[1:], (6, 3)], strict=True):
        lattice[0, frame, place, 0 if after > frame else 1] = -0.1
    starts = band_starts(lattice, torch.tensor([6]), torch.tensor([3]), 3)[0].tolist()
    assert all(starts[frame] <= place < starts[frame] + 3 for frame, place in path)


def test_band_is_as_wide_as_the_text_with_the_most_tokens_a_frame_needs():
    assert band_width(2, torch.tensor([6, 2, 0]), torch.tensor([3, 5, 0])) == 4  # 3 tokens in the first frame, then 2
    assert band_width(5, torch.tensor([6, 2, 0]), torch.tensor([3, 5, 0])) == 5


@pytest.mark.parametrize("seed", range(5))
def test_loss_in_a_band_is_the_sum_over_its_paths(seed):
    frames, width = (6, 4, 5, 3), 2
    lattice, starts = bands(seed, width, frames)
    places = starts.unsqueeze(2) + torch.arange(width)
    inside = lattice.gather(2, places.unsqueeze(3).expand(-1, -1, -1, 2)).requires_grad_()
    spread = spread_band(inside, places, 4)
    losses = transducer_losses(spread, torch.tensor(frames), torch.tensor(LENGTHS))
    for row, count in enumerate(frames):
        log_probs = torch.full((count, 4, VOCAB), -math.inf, dtype=torch.float64)
        for frame in range(count):
            for place in places[row, frame].tolist():
                log_probs[frame, place, 0] = lattice[row, frame, place, 0]
                if place < LENGTHS[row]:
                    log_probs[frame, place, TOKENS[row, place]] = lattice[row, frame, place, 1]
        assert losses[row].item() == pytest.approx(enumerated(log_probs, text(row)), rel=1e-6)
    losses.sum().backward()
    assert inside.grad.isfinite().all()


def test_loss_of_the_simple_joiner_is_added():
    simple, lattice = lattice_of(scores(1)), lattice_of(scores(2))
    objective = JointTransducer(TransducerConfig(prune_range=3))
    losses, _ = objective.losses(joint_lattice(None, simple, lattice), torch.tensor(FRAMES), targets())
    given = torch.tensor(FRAMES), torch.tensor(LENGTHS)
    torch.testing.assert_close(losses, transducer_losses(lattice, *given) + 0.5 * transducer_losses(simple, *given))


def test_band_without_room_for_a_token_is_refused():
    with pytest.raises(ValidationError, match="no room for a token: use 5, or 0 for the whole text"):
        TransducerConfig(prune_range=1)
