"""The loss of language models."""

import pytest
import torch

from speech.lm.next_word import next_word_losses, predicted_words


def blocks(*words):
    """Blocks of word numbers, and their lengths."""
    rows = [torch.tensor(block, dtype=torch.float32) for block in words]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).unsqueeze(2), torch.tensor(list(map(len, rows)))


def random_outputs(batch, size, seed=1):
    return torch.softmax(torch.randn(batch, size, 5, generator=torch.Generator().manual_seed(seed)), -1).log()


def test_words_and_sentence_ends_are_predicted_but_not_starts():
    """<s> 3 </s> <s> 4 3 </s>: of the six words behind the first, the second <s> follows an end."""
    outputs, (words, lengths) = random_outputs(1, 9), blocks([1, 3, 2, 1, 4, 3, 2])
    (loss,) = next_word_losses(outputs, words, lengths)
    followed = [(0, 3), (1, 2), (3, 4), (4, 3), (5, 2)]
    assert float(loss) == pytest.approx(-sum(float(outputs[0, at, word]) for at, word in followed))
    assert predicted_words(words, lengths) == 5


def test_a_block_counts_the_same_in_any_batch():
    short, long = [1, 3, 2], [1, 4, 3, 4, 2]
    outputs, (words, lengths) = random_outputs(2, 8), blocks(short, long)
    together = next_word_losses(outputs, words, lengths)
    for row, block in enumerate((short, long)):
        alone = next_word_losses(outputs[row : row + 1, : len(block)], *blocks(block))
        assert float(alone) == pytest.approx(float(together[row]))
    assert predicted_words(words, lengths) == 2 + 4


def test_text_of_one_word_predicts_nothing():
    words, lengths = blocks([1])
    assert next_word_losses(random_outputs(1, 1), words, lengths).tolist() == [0.0]
    assert predicted_words(words, lengths) == 0
