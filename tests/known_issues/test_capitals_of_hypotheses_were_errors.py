"""Capitals, punctuation and digits of Whisper's hypotheses were errors against normalized transcripts."""

import pytest

from recognition.bundle import BundleSpec
from speech.hypotheses import Hypothesis
from speech.text import NormalizerConfig


@pytest.mark.parametrize(
    ("tokenizer", "normalizer", "language", "expected"),
    [
        ({"kind": "whisper", "language": "en"}, {}, "", "he's thirty"),
        ({"kind": "whisper", "language": "en"}, {"kind": "auto"}, "", "he's thirty"),
        ({"kind": "whisper", "language": "auto"}, {"kind": "auto"}, "en", "he's thirty"),
        ({"kind": "whisper", "language": "en"}, {"kind": "none"}, "", "He's 30!"),
        ({"kind": "whisper", "language": "auto"}, {"kind": "auto", "numbers": "words"}, "haw", "he's thirty"),
        ({"kind": "bpe"}, {}, "", "He's 30!"),
        (None, {}, "", "He's 30!"),
    ],
)
def test_hypothesis_is_normalized_as_the_transcripts_if_the_model_writes_as_people_do(
    tokenizer, normalizer, language, expected
):
    spec = BundleSpec.model_construct(tokenizer=tokenizer, normalizer=NormalizerConfig(**normalizer))
    assert spec.comparable(Hypothesis(text="He's 30!", language=language)) == expected
