"""Joint CTC and attention: losses and gradients against a plain reference in float64, and what is counted."""

import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from speech.objectives.attention import AttentionConfig, JointAttention, joint_outputs, parted_outputs
from speech.objectives.base import smoothed_log_probs

TOKENS, LENGTHS, FRAMES = [[2, 1, 3], [4, 4, 0], [0, 0, 0], [1, 0, 0]], [3, 2, 0, 1], [6, 5, 2, 1]
VOCAB = 5


def targets(tokens=TOKENS, lengths=LENGTHS):
    return SimpleNamespace(tokens=torch.tensor(tokens), token_lengths=torch.tensor(lengths))


def scores(seed=0, frames=6, places=4, batch=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, count, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (frames, places)
    ]


def softmax(row):
    """Log probabilities of a row of numbers, one after the other."""
    total = math.log(sum(math.exp(x) for x in row))
    return [x - total for x in row]


def all_alignments(log_probs, wanted):
    """The negative log probability of tokens, added up over all paths of frames."""
    total = 0.0
    paths = [([], 0.0)]
    for row in log_probs:
        paths = [([*path, token], score + value) for path, score in paths for token, value in enumerate(row)]
    for path, score in paths:
        spelled = [token for place, token in enumerate(path) if token and (place == 0 or path[place - 1] != token)]
        total += math.exp(score) if spelled == wanted else 0.0
    return -math.log(total)


def reference(encoder, decoder, weight, smoothing, end=0):
    """The losses from the definitions, in plain Python."""
    losses = []
    for row, (length, frames) in enumerate(zip(LENGTHS, FRAMES, strict=True)):
        wanted = TOKENS[row][:length]
        attention = 0.0
        for place, token in enumerate([*wanted, end]):
            log_probs = softmax(decoder[row][place])
            share = [smoothing / VOCAB + (1 - smoothing) * (number == token) for number in range(VOCAB)]
            attention -= sum(q * p for q, p in zip(share, log_probs, strict=True))
        ctc = all_alignments([softmax(outputs) for outputs in encoder[row][:frames]], wanted) if weight else 0.0
        losses.append(weight * ctc + (1 - weight) * attention)
    return losses


@pytest.mark.parametrize(
    ("weight", "smoothing", "end"), [(0.3, 0.1, 0), (0, 0.2, 0), (0.7, 0, 0), (1, 0, 0), (0, 0, 4)]
)
@pytest.mark.variants(3)
def test_losses_and_gradients_are_those_of_a_plain_reference(weight, smoothing, end):
    encoder, decoder = scores()
    objective = JointAttention(AttentionConfig(ctc_weight=weight, label_smoothing=smoothing), end)
    outputs = joint_outputs(encoder.log_softmax(-1), decoder.log_softmax(-1))
    losses, unalignable = objective.losses(outputs, torch.tensor(FRAMES), targets())
    assert unalignable == 0
    expected = reference(encoder.tolist(), decoder.tolist(), weight, smoothing, end)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(losses.sum(), (encoder, decoder))
    step = 1e-5
    for which, *place in ((0, 0, 2, 1), (0, 1, 4, 4), (1, 0, 3, 0), (1, 1, 0, 4), (1, 2, 0, 0), (1, 1, 3, 2)):
        moved = []
        for sign in (1, -1):
            values = [encoder.detach().clone(), decoder.detach().clone()]
            values[which][tuple(place)] += sign * step
            moved.append(sum(reference(values[0].tolist(), values[1].tolist(), weight, smoothing, end)))
        assert float(grads[which][tuple(place)]) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-7)


def test_language_is_a_token_before_the_text():
    (encoder, decoder), spoken = scores(places=5), ["en-US", "de", "de", "en"]
    objective = JointAttention(AttentionConfig(ctc_weight=0.3), languages={"en": 3, "de": 4})
    outputs = joint_outputs(encoder.log_softmax(-1), decoder.log_softmax(-1))
    given = SimpleNamespace(**vars(targets()), languages=spoken)
    losses, _ = objective.losses(outputs, torch.tensor(FRAMES), given)
    texts = reference(encoder.tolist(), decoder[:, 1:].tolist(), 0.3, 0.1, 0)
    for row, token in enumerate((3, 4, 4, 3)):
        log_probs = softmax(decoder[row, 0].tolist())
        language = -0.9 * log_probs[token] - 0.1 * sum(log_probs) / VOCAB
        assert losses[row].item() == pytest.approx(texts[row] + 0.7 * language)
    assert objective.items(given) == sum(LENGTHS) + 2 * len(LENGTHS)
    right = torch.full_like(decoder, -9.0)
    right[[0, 1, 2, 3], 0, [3, 4, 4, 4]] = 0.0  # the last one is wrong, and all places of texts but ends are
    right[:, 1:, 0] = 0.0
    figures = objective.figures(right, torch.tensor(FRAMES), given)
    assert figures == {"token_accuracy": (3.0 + len(LENGTHS), objective.items(given))}


def test_utterance_too_short_for_ctc_has_no_loss_and_is_counted():
    encoder, decoder = scores()
    outputs = joint_outputs(encoder.log_softmax(-1), decoder.log_softmax(-1))
    losses, unalignable = JointAttention(AttentionConfig()).losses(outputs, torch.tensor([6, 2, 2, 1]), targets())
    assert unalignable == 1
    assert (losses == 0).tolist() == [False, True, False, False]
    losses.sum().backward()
    assert torch.isfinite(encoder.grad).all()
    assert not decoder.grad[1].any()


def test_loss_does_not_depend_on_padding_of_tokens_or_frames():
    encoder, decoder = scores(frames=9)
    objective = JointAttention(AttentionConfig())
    outputs = joint_outputs(encoder.log_softmax(-1), decoder.log_softmax(-1))
    together, _ = objective.losses(outputs, torch.tensor(FRAMES), targets())
    for row, (length, frames) in enumerate(zip(LENGTHS, FRAMES, strict=True)):
        own = targets([TOKENS[row][:length]], [length])
        alone = joint_outputs(
            encoder[row : row + 1, :frames].log_softmax(-1), decoder[row : row + 1, : length + 1].log_softmax(-1)
        )
        torch.testing.assert_close(objective.losses(alone, torch.tensor([frames]), own)[0][0], together[row])


def test_ends_of_texts_count_as_tokens():
    assert JointAttention(AttentionConfig()).items(targets()) == sum(LENGTHS) + len(LENGTHS)


def test_share_of_right_tokens_counts_ends():
    decoder = torch.full((4, 4, VOCAB), -9.0)
    for row, (tokens, length) in enumerate(zip(TOKENS, LENGTHS, strict=True)):
        for place, token in enumerate([*tokens[:length], 0]):
            decoder[row, place, token] = 0.0
    decoder[1, 2] = torch.tensor([-9.0, 0, -9, -9, -9])  # the end of the second one is missed
    figures = JointAttention(AttentionConfig()).figures(decoder.log_softmax(-1), torch.tensor(FRAMES), targets())
    assert figures == {"token_accuracy": (9.0, 10)}


def test_joint_outputs_are_parted_again():
    encoder, decoder = scores()
    assert [part.shape[1] for part in parted_outputs(joint_outputs(encoder, decoder), targets())] == [6, 4]
    assert [part.shape[1] for part in parted_outputs(joint_outputs(None, decoder), targets())] == [0, 4]


def test_smoothed_target_keeps_its_probability_and_the_share_of_all():
    log_probs = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    expected = 0.7 * math.log(0.5) + 0.1 * (math.log(0.5) + 2 * math.log(0.25))
    assert float(smoothed_log_probs(log_probs, torch.tensor([[0]]), 0.3)) == pytest.approx(expected)


@pytest.mark.parametrize("fields", [{"ctc_weight": 1.1}, {"ctc_weight": -0.1}, {"label_smoothing": 1.0}])
def test_shares_beyond_their_range_are_refused(fields):
    with pytest.raises(ValidationError):
        AttentionConfig(**fields)
