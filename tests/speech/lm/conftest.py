"""Fixtures of the language models' tests."""

import random

import pytest
import torch

from speech.lm.counting import count_ngrams
from speech.lm.encoding import encode_lines
from speech.lm.estimation import smoothed
from speech.lm.next_word import next_word_losses, predicted_words


def zipf_sentences(count=300, words=40, seed=0):
    """Sentences in which the frequent words of a small vocabulary follow each other in a pattern."""
    chosen = random.Random(seed)
    weights = [1 / rank for rank in range(1, words + 1)]
    sentences = []
    for _ in range(count):
        sentence = chosen.choices(range(words), weights, k=chosen.randint(1, 9))
        for at in range(1, len(sentence)):
            if chosen.random() < 0.4:
                sentence[at] = (sentence[at - 1] * 7 + 1) % words
        sentences.append([f"w{word}" for word in sentence])
    return sentences


def train_in_place(spec, text, folder):
    """A trainer of networks without the engine: some steps of Adam on the whole text."""
    torch.manual_seed(0)
    network = spec.build_model()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    rows = [torch.from_numpy(block) for block in text.blocks()]
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).float().unsqueeze(2)
    lengths = torch.tensor([len(row) for row in rows])
    for _ in range(25):
        optimizer.zero_grad()
        losses = next_word_losses(network(inputs, lengths)[0], inputs, lengths)
        (losses.sum() / predicted_words(inputs, lengths)).backward()
        optimizer.step()
    spec.save(folder, network.state_dict())
    return {"loss": float(losses.sum().detach())}


@pytest.fixture
def in_place():
    return train_in_place


@pytest.fixture
def sentences():
    return zipf_sentences()


@pytest.fixture
def make(tmp_path_factory):
    """Estimates a model from sentences."""

    def build(sentences, order=3, method="kneser-ney", allowed=None, block_lines=100_000, workers=1, **options):
        folder = tmp_path_factory.mktemp("lm")
        text = encode_lines([" ".join(sentence) for sentence in sentences], folder, block_lines)
        counts = count_ngrams(text, order, folder, workers)
        mask = None
        if allowed is not None:
            import numpy as np

            mask = np.array([word in allowed for word in text.words])
        return smoothed(text.words, counts, method, folder, allowed=mask, workers=workers, **options)[0]

    return build
