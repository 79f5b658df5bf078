"""The TextGrids of the utterances `a/b` and `a_b` had one file: the second one replaced the first."""

from types import SimpleNamespace

from flows.cli.align import write_files
from recognition.timings import Word


def test_each_utterance_has_a_textgrid(tmp_path):
    ids = ["a/b", "a_b", "a%2Fb", ".."]
    found = [
        SimpleNamespace(id=name, words=[Word(name, 0.0, 0.5, 1.0)], units=[], duration=1.0, score=0.0, confidence=1.0)
        for name in ids
    ]
    aligned = SimpleNamespace(units="phones", found=found, suspicious=lambda deviations: [], texts={}, heard={})
    write_files(aligned, tmp_path, 5.0)
    texts = [path.read_text() for path in (tmp_path / "textgrids").iterdir()]
    assert sorted(name for name in ids for text in texts if f'"{name}"' in text) == sorted(ids)
    assert len(texts) == len(ids)
