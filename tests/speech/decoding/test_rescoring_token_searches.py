"""A language model of words ranks the hypotheses of searches over tokens again, in the form of the transcripts."""

import math

import pytest
from support import load_beside

from speech.decoding import AttentionDecodeConfig, AttentionSearch, TransducerDecodeConfig, TransducerSearch
from speech.lm import LmError
from speech.lm.kenlm import KenlmModel

attention = load_beside(__file__, "test_attention_search.py")
transducer = load_beside(__file__, "test_transducer_search.py")
WORDS = """\\data\\
ngram 1=6
ngram 2=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.3
-0.7\t</s>
-0.4\tA\t-0.2
-0.6\tBA\t-0.1
-0.9\tB

\\2-grams:
-0.1\tA BA
-0.2\t<s> B

\\end\\
"""
SIZE = 3


def transcript(text):
    """Stands for a normalizer: capitals, and a word ends before each a of b a."""
    return text.upper().replace("BA", " BA ").strip()


def in_transcripts(hypothesis):
    return transcript(hypothesis.text)


@pytest.fixture
def lm(tmp_path):
    (tmp_path / "words.arpa").write_text(WORDS)
    return str(tmp_path / "words.arpa")


def log_prob(lm, text):
    """Natural log probability of a text's transcript, by the format's definition of unknown words."""
    return math.log(10) * sum(KenlmModel(lm, ["A", "B", "BA"]).sentence(transcript(text).split()))


def searches():
    """A search of each kind with what it reads, and a way to make it with other fields."""
    tokenizer = attention.tokenizer(SIZE)
    net = attention.network(SIZE)
    encoded, frames, _ = attention.speech((4, 3), SIZE)
    common = {"times": "none", "beam_tokens": 0, "beam": 1000, "nbest": 1000}
    yield lambda **fields: AttentionSearch(AttentionDecodeConfig(**common | fields), net, tokenizer), (encoded, frames)
    model = transducer.network(SIZE)
    encoded, frames, _ = transducer.speech((4, 3), model)
    yield (
        lambda **fields: TransducerSearch(TransducerDecodeConfig(**common | fields), model, tokenizer),
        (
            encoded,
            frames,
        ),
    )


@pytest.mark.parametrize(("weight", "word_score"), [(0.4, 0.0), (1.7, 0.9), (0.0, -0.5)])
def test_scores_of_all_hypotheses_are_raised_by_the_transcripts_probability(lm, weight, word_score):
    for search_with, heard in searches():
        plain = search_with()(*heard)
        search = search_with(rescore_lm=lm, rescore_weight=weight, word_score=word_score, rescore_nbest=1000)
        search.comparable = in_transcripts
        for before, after in zip(plain, search(*heard), strict=True):
            expected = {
                option.text: option.score
                + weight * log_prob(lm, option.text)
                + word_score * len(transcript(option.text).split())
                for option in before.nbest
            }
            several = {option.text: option.score for option in after.nbest}
            assert several == pytest.approx(expected, abs=1e-6)
            assert after.text == max(expected, key=expected.get)
            assert after.score == pytest.approx(max(expected.values()), abs=1e-6)
            assert [option.score for option in after.nbest] == sorted(several.values(), reverse=True)


def test_another_text_wins_with_its_own_tokens_and_times(lm):
    changed = 0
    for search_with, heard in searches():
        plain = search_with(times="auto")(*heard)
        again = search_with(times="auto", rescore_lm=lm, rescore_weight=3.0)(*heard)
        for before, after in zip(plain, again, strict=True):
            changed += before.text != after.text
            assert attention.tokenizer(SIZE).decode(after.tokens) == after.text
            assert len(after.frames) == len(after.tokens)
    assert changed


def test_only_the_best_of_the_search_are_ranked_again(lm):
    for search_with, heard in searches():
        plain = search_with()(*heard)
        for count in (1, 3):
            several = search_with(rescore_lm=lm, rescore_weight=5.0, rescore_nbest=count, nbest=1)(*heard)
            for before, after in zip(plain, several, strict=True):
                assert after.text in [option.text for option in before.nbest[:count]]


def test_lengths_divide_the_whole_score(lm):
    search_with, heard = next(searches())
    common = {"rescore_lm": lm, "rescore_weight": 0.7, "rescore_nbest": 1000}
    plain, divided = search_with(**common)(*heard), search_with(**common, length_power=0.8)(*heard)
    for one, powered in zip(plain, divided, strict=True):
        expected = {option.text: option.score / (len(option.text) + 1) ** 0.8 for option in one.nbest}
        assert {option.text: option.score for option in powered.nbest} == pytest.approx(expected, abs=1e-6)


def test_models_are_shared_and_weights_are_not(lm):
    for search_with, heard in searches():
        first = search_with(rescore_lm=lm, rescore_weight=0.2)
        first.comparable = in_transcripts
        first.prepare()
        other = first.with_config(first.cfg.model_copy(update={"rescore_weight": 2.0}))
        alone = search_with(rescore_lm=lm, rescore_weight=2.0)
        alone.comparable = in_transcripts
        assert other._rescorer is first._rescorer
        assert other(*heard) == alone(*heard)


def test_a_model_whose_words_cannot_be_listed_is_refused(tmp_path):
    (tmp_path / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0" + bytes(100))
    search_with, heard = next(searches())
    with pytest.raises(LmError, match="lm.bin lists no words.*give the ARPA file itself"):
        search_with(rescore_lm=str(tmp_path / "lm.bin"))(*heard)
    with pytest.raises(LmError, match="none.arpa cannot be read"):
        search_with(rescore_lm=str(tmp_path / "none.arpa"))(*heard)
