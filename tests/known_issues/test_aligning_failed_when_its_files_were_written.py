"""After hours of work, `starling align` could not write: its folder was a file, or a TextGrid's name was too long."""

import pytest

from flows.cli.align import write_files
from speech.alignments import AlignedUtterance, Alignment, Span
from tasks.alignment import AlignedCorpus


@pytest.mark.parametrize("below", ["", "aligned"])
def test_folder_that_cannot_be_made_is_refused_before_the_work(invoke, tmp_path, monkeypatch, below):
    monkeypatch.setattr("flows.cli.align._aligned", lambda *_: pytest.fail("it worked first"))
    (tmp_path / "file").touch()
    made = invoke("align", "model", tmp_path, "-o", tmp_path / "file" / below, code=1)
    assert "is a file" in made.stderr
    assert "--output" in made.stderr


def test_long_ids_have_a_file_each(tmp_path):
    names = ["a/" * 120, "a/" * 119 + "b/", "é" * 100 + "/" * 40, "short"]
    spans = (Span("w", 0, 9, 0.75),)
    made = [AlignedUtterance(name, "w", Alignment(name, spans, (), -0.5, duration=1.0)) for name in names]
    write_files(AlignedCorpus(made), [], tmp_path)
    assert len(list((tmp_path / "textgrids").iterdir())) == len(names)
    assert (tmp_path / "textgrids" / "short.TextGrid").is_file()
