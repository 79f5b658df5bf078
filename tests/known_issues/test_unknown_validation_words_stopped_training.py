"""A validation transcript with a word or letter that training lacks stopped training before its first step."""

import pytest

from recognition.data.dataset import encode
from speech.tokens import TokenConfig, TokenError, train_tokenizer


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_unknown_symbols_are_skipped_on_request(kind):
    tokenizer = train_tokenizer(TokenConfig(kind=kind), ["open door", "door open"])
    text = "open window door" if kind == "words" else "open zzz door"
    with pytest.raises(TokenError):
        encode(tokenizer, text)
    assert tokenizer.decode(encode(tokenizer, text, lenient=True)) == "open door"
    assert encode(tokenizer, "xyz" if kind == "characters" else "xyz abc", lenient=True) == []
