"""`merged_ngrams` raised an IndexError for models that lack suffixes of their n-grams, or gave them wrong weights.

Pruning may remove such suffixes, as SRILM's does: an ARPA file needs the contexts of its n-grams only.
"""

import itertools

import pytest

from speech.lm import Mixture, merged_ngrams, read_arpa

PRUNED = r"""
\data\
ngram 1=6
ngram 2=2
ngram 3=2

\1-grams:
-1	<unk>
-99	<s>	-0.2
-0.69897	</s>
-0.5228787	a	-0.3
-0.69897	b	-0.1
-0.69897	c

\2-grams:
-0.3	<s> a	-0.1
-0.4	b c	-0.2

\3-grams:
-0.2	<s> a b
-0.2	b c a

\end\
"""
"""There is neither "a b" nor "c a"."""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "lm.arpa").write_text(PRUNED)
    return read_arpa(tmp_path / "lm.arpa")


def state_after(model, words):
    state = model.start
    for word in words:
        state, _ = model.score(state, model.words.index(word))
    return state


def test_listed_ngrams_keep_their_probabilities_and_all_sum_to_one(model):
    merged = merged_ngrams([model, model], [0.4, 0.6])
    mixture = Mixture([model, model], [0.4, 0.6])
    assert merged.tables.counts == (6, 2, 2)
    for *context, word in (["a"], ["a", "b"], ["b", "c"], ["b", "c", "a"]):
        number = merged.words.index(word)
        own, mixed = (each.score(state_after(each, context), number)[1] for each in (merged, mixture))
        assert own == pytest.approx(mixed, abs=1e-5)
    predicted = [number for number, word in enumerate(merged.words) if word != "<s>"]
    for words in itertools.chain.from_iterable(itertools.product("abc", repeat=length) for length in range(4)):
        state = state_after(merged, words)
        assert sum(10 ** merged.score(state, number)[1] for number in predicted) == pytest.approx(1, abs=1e-5)
