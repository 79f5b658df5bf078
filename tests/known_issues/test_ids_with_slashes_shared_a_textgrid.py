"""The TextGrids of the utterances `a/b` and `a_b` had one file: the second one replaced the first."""

from flows.cli.align import write_files
from speech.alignments import AlignedUtterance, Alignment, Span
from tasks.alignment import AlignedCorpus


def test_each_utterance_has_a_textgrid(tmp_path):
    ids = ["a/b", "a_b", "a%2Fb", ".."]
    corpus = AlignedCorpus([AlignedUtterance(name, name, Alignment(name, (Span(name, 0, 50),), ())) for name in ids])
    write_files(corpus, [], tmp_path)
    texts = [path.read_text() for path in (tmp_path / "textgrids").iterdir()]
    assert sorted(name for name in ids for text in texts if f'"{name}"' in text) == sorted(ids)
    assert len(texts) == len(ids)
