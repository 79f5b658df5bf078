"""Our models are those of KenLM's lmplz: log10 of all probabilities and back-off weights within 1e-4.

Runs where `lmplz` is on the PATH, or the environment variable LMPLZ names it.
"""

import bz2
import itertools
import os
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest

from speech.lm import NgramConfig, Sources, estimate, load, read_arpa

LMPLZ = os.environ.get("LMPLZ") or shutil.which("lmplz")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LMPLZ is None, reason="needs lmplz")]


def books(data):
    with bz2.open(data / "text" / "books-1.txt.bz2", "rt") as file:
        return [line.strip().lower() for line in itertools.islice(file, 30_000)]


def transcripts(data):
    paths = sorted((data / "LibriSpeech" / "train-clean-5").rglob("*.trans.txt"))
    return [line.partition(" ")[2].strip().lower() for path in paths for line in path.read_text().splitlines()]


TEXTS = {
    "books, trigrams": (books, {}),
    "books, trigrams, singletons cut": (books, {"cutoffs": (0, 0, 1)}),
    "books, 4-grams, bigrams and more cut": (books, {"order": 4, "cutoffs": (0, 1, 1, 2)}),
    "books, 5,000 words": (books, {"vocabulary": 5000}),
    "transcripts, bigrams": (transcripts, {"order": 2}),
    "transcripts, 5-grams": (transcripts, {"order": 5}),
    "characters, 6-grams": (transcripts, {"order": 6, "unit": "character", "discount_fallback": (0.5, 1.0, 1.5)}),
}


def lmplz_model(lines, cfg, folder):
    """The model that lmplz makes of the same text."""
    if cfg.unit == "character":
        lines = [" ".join("▁".join(line.split())) for line in lines]
    lines = [line for line in lines if line]
    text, arpa = folder / "text.txt", folder / "lmplz.arpa"
    text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [LMPLZ, "-o", str(cfg.order), "-S", "40%", "-T", str(folder), "--text", str(text), "--arpa", str(arpa)]
    if cfg.cutoffs:
        command += ["--prune", *map(str, cfg.cutoffs)]
    if cfg.discount_fallback is not None:
        command += ["--discount_fallback", *map(str, cfg.discount_fallback)]
    if cfg.vocabulary is not None:
        # most_common keeps the order of first appearance among equally frequent words, as our own limit does
        frequent = Counter(word for line in lines for word in line.split()).most_common(cfg.vocabulary)
        (folder / "vocabulary.txt").write_text("\n".join(word for word, _ in frequent), encoding="utf-8")
        command += ["--limit_vocab_file", str(folder / "vocabulary.txt")]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return read_arpa(arpa)


@pytest.mark.parametrize("name", TEXTS)
def test_probabilities_and_back_off_weights_equal_lmplz(tmp_path, shared_data, name):
    make_lines, options = TEXTS[name]
    lines = make_lines(shared_data)
    cfg, folder = NgramConfig(**options), tmp_path / "ours"
    folder.mkdir()
    estimate(Sources(transcripts=lines), cfg, folder)
    ours, theirs = load(cfg, folder), lmplz_model(lines, cfg, tmp_path)
    assert ours.tables.counts == theirs.tables.counts
    known = theirs.words.indices(list(ours.words))
    assert len(set(known.tolist())) == len(known)
    states = np.zeros(1, dtype=np.int64)  # of lmplz's model, for each of ours
    at = np.zeros(len(ours.tables.keys), dtype=np.int64)
    for order in range(1, ours.order + 1):
        first, last = ours.tables.bounds(order)
        heads, words = np.divmod(ours.tables.keys[first:last], len(ours.words))
        places, hit = theirs.find(states[heads], known[words])
        assert hit.all()
        at[first:last] = places
        states = np.concatenate([states, places + 1])
    np.testing.assert_allclose(ours.tables.log_probs, theirs.tables.log_probs[at], atol=1e-4)
    lower = len(ours.tables.backoffs)
    np.testing.assert_allclose(ours.tables.backoffs, theirs.tables.backoffs[at[:lower]], atol=1e-4)
