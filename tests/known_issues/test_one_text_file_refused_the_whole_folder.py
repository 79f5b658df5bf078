"""One text file of twelve in UTF-16 without a byte-order mark, or one that could not be opened, stopped the corpus."""

import pytest
from support import write_tone

from storage.corpora import open_corpus


def make_folder(folder, content):
    """Three utterances; the second one's text file has this content."""
    for name in ("a", "b", "c"):
        write_tone(folder / f"{name}.wav")
        (folder / f"{name}.txt").write_text("one two")
    (folder / "b.txt").write_bytes(content)
    return folder


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-8-sig"])
@pytest.mark.parametrize("text", ["seven", "да", "7", "schön\nwar's", "γεια σου", "שלום"])
def test_encodings_are_detected_without_a_mark(tmp_path, encoding, text):
    reader = open_corpus("auto", str(make_folder(tmp_path, text.encode(encoding))))
    assert [u.text for u in reader] == ["one two", " ".join(text.split()), "one two"]
    assert reader.problems == []


@pytest.mark.parametrize(
    "content",
    ["schön".encode("latin-1"), b"one\0two", b"\xff\xfe\xfd", bytes(64), b"x" * (2 << 20)],
)
def test_text_that_cannot_be_read_costs_one_utterance(tmp_path, content):
    reader = open_corpus("sidecar", str(make_folder(tmp_path, content)))
    assert [u.id for u in reader] == ["a", "c"]
    assert [(problem.id, problem.reason) for problem in reader.problems] == [("b", "bad-line")]


def test_file_that_cannot_be_opened_costs_its_utterances(tmp_path):
    folder = make_folder(tmp_path / "own", b"")
    (folder / "b.txt").unlink()
    (folder / "b.txt").symlink_to("gone.txt")
    reader = open_corpus("sidecar", str(folder))
    assert [u.id for u in reader] == ["a", "c"]
    assert [(problem.id, problem.reason) for problem in reader.problems] == [("b", "bad-line")]
    assert "No such file" in reader.problems[0].detail


@pytest.mark.parametrize("kind", ["librispeech", "tedlium"])
def test_transcript_of_a_chapter_that_cannot_be_opened_costs_this_chapter(tmp_path, kind):
    for name in ("1", "2"):
        audio, table = {
            "librispeech": (f"{name}/1/{name}-1-0.wav", f"{name}/1/{name}-1.trans.txt"),
            "tedlium": (f"wav/{name}.wav", f"stm/{name}.stm"),
        }[kind]
        write_tone(tmp_path / audio)
        (tmp_path / table).parent.mkdir(parents=True, exist_ok=True)
        text = f"{name}-1-0 one\n" if kind == "librispeech" else f"{name} 1 s 0 0.5 <o> one\n"
        if name == "1":
            (tmp_path / table).write_text(text)
        else:
            (tmp_path / table).symlink_to("gone")
    reader = open_corpus(kind, str(tmp_path))
    assert [u.text for u in reader] == ["one"]
    assert any("cannot be read (No such file" in problem.detail for problem in reader.problems)
