"""`starling config check` found no mistake in a configuration whose section `rescoring` names text that is missing."""

from support import tiny_document

from tasks.config.pipeline import parse_config
from tasks.stages.config_check import find_problems


def test_missing_text_of_both_language_models_is_found(tmp_path):
    missing = [{"text": {"paths": [str(tmp_path / name)]}} for name in ("first.txt", "second.txt")]
    decode = {"kind": "words", "rescore_nbest": 10}
    config = parse_config(tiny_document(lm=missing[0], rescoring=missing[1], decode=decode))
    found = [problem for problem in find_problems(config) if "lm.text: there is no file" in problem]
    assert [name in text for name, text in zip(("first.txt", "second.txt"), found, strict=True)] == [True, True]
