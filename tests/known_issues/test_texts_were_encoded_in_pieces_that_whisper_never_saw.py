"""Some tokenizers of Whisper lack a merge: fine-tuned on what they made of texts, it forgot how to spell."""

import json

import pytest
from support import load_beside

from speech.models.networks.whisper_decoder import read_whisper_tokenizer, with_missing_merges

whisper = load_beside(__file__, "../speech/test_whisper_decoder.py")


@pytest.mark.parametrize("lost", [[0], [1, 4], [0, 2, 4]])
def test_a_merge_that_the_tokenizer_lacks_is_added(tmp_path, lost, caplog):
    caplog.set_level("INFO")
    whisper.write_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole, damaged = json.loads(path.read_text()), json.loads(path.read_text())
    assert with_missing_merges(whole) is whole
    damaged["model"]["merges"] = [pair for n, pair in enumerate(whole["model"]["merges"]) if n not in lost]
    path.write_text(json.dumps(damaged))
    names = read_whisper_tokenizer(tmp_path)
    assert [names.symbols[token] for token in names.encode("hello lo el")] == ["Ġhello", "Ġ", "lo", "Ġ", "el"]
    assert with_missing_merges(damaged) == whole
    assert f"lacks {len(lost)} merge" in caplog.text  # for whoever looks for it: nothing is to be done


def test_merges_are_left_alone_if_the_pieces_are_numbered_in_another_order(tmp_path):
    whisper.write_folder(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["vocab"] |= {"Ġh": 260, "Ġhello": 256}
    assert with_missing_merges(described) is described
    del described["model"]["merges"][0]
    assert with_missing_merges(described) is described


@pytest.mark.parametrize("described", [{}, {"model": 1}, {"model": {"vocab": {"a": 0}, "merges": [["a"]]}}])
def test_what_is_no_byte_level_tokenizer_is_left_as_it_is(described):
    assert with_missing_merges(described) is described
