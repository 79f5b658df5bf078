"""Text for a language model was normalized as that of no language, unlike the transcripts.

With `kind: auto`, English numbers stayed digits; Turkish capitals became other letters; and with `numbers: words`, the
stage ended with an error about the language ''.
"""

import pytest
from support import small_corpus

from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.stages.lm import LM, coming_words
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD


@pytest.mark.parametrize(
    ("language", "normalizer", "line", "words"),
    [
        ("en", {"kind": "auto"}, "It's 5 o'clock!", {"it's", "five", "o'clock"}),
        ("tr", {"kind": "auto"}, "IRMAK İZMİR", {"ırmak", "izmir"}),
        ("de", {"kind": "latin", "numbers": "words"}, "Um 5 Uhr.", {"um", "fünf", "uhr"}),
    ],
)
def test_text_is_normalized_in_the_language_of_the_transcripts(home, tmp_path, language, normalizer, line, words):
    if "numbers" in normalizer:
        pytest.importorskip("num2words")
    small_corpus(tmp_path, rate=8000)
    text = tmp_path / "text.txt"
    text.write_text(f"{line}\n", encoding="utf-8")
    source = {"kind": "table", "path": str(tmp_path / "metadata.csv"), "language": language}
    document = {
        "name": "text",
        "data": {"sources": [source], "sample_rate": 8000, "normalizer": normalizer},
        "lm": {"order": 1, "smoothing": "witten-bell", "text": [str(text)], "transcripts": False},
    }
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, LM):
        stage.execute(run)
    listed = run.result("lm").store.read("words.txt").decode().split()
    assert set(listed) == words
    assert set(coming_words(run.config, run.result("prepare").output)) == words
