"""A packed language model that is cut off or damaged ended in a traceback of gzip, without the file's name."""

import gzip
import random

import pytest

from speech.hmm.decoding_graph import word_graph
from speech.hmm.topology import PhoneSet
from speech.lm import LmError
from speech.lm.kenlm import arpa_words


def packed_model(count):
    """An ARPA file of two words and many bigrams, whose numbers cannot be packed well."""
    draw = random.Random(1)
    unigrams = "".join(f"-1\t{word}\t0\n" for word in ("<s>", "</s>", "a", "b"))
    bigrams = "".join(f"{-draw.random()}\ta b\n" for _ in range(count))
    return gzip.compress(
        f"\\data\\\nngram 1=4\nngram 2={count}\n\n\\1-grams:\n{unigrams}\n\\2-grams:\n{bigrams}\n\\end\\\n".encode()
    )


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: data[:20] + bytes(20) + data[40:]])
def test_damaged_file_is_named_when_its_words_are_read(tmp_path, damage):
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(damage(packed_model(100)))
    with pytest.raises(LmError, match=r"lm\.arpa\.gz cannot be read"):
        arpa_words(str(path))


def test_file_cut_off_after_its_words_is_named_when_a_graph_is_made(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    data = packed_model(20_000)
    path.write_bytes(data[: len(data) // 2])
    assert arpa_words(str(path)) == ["a", "b"]
    with pytest.raises(LmError, match=r"lm\.arpa\.gz cannot be read"):
        word_graph(PhoneSet.of([("AH0",)]), {"a": [("AH0",)]}, path)
