"""Text for language models: any damage is counted, and the test set's sentences stay out."""

import bz2
import functools
import gzip
import lzma
import random

import pytest

from speech.lm import LmError, Text, TextConfig, Units
from speech.lm.sources import Protection
from speech.text import NormalizerConfig

TEST = "he was not an inclement man and he loved the sea"


def read(paths, **options):
    cfg = TextConfig(paths=tuple(map(str, paths)), **options.pop("cfg", {}))
    blocks = list(Text(cfg, NormalizerConfig(), **options).blocks())
    counts = sum((block.counts for block in blocks), type(blocks[0].counts)()) if blocks else {}
    return [line for block in blocks for line in block.lines], dict(counts)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("t.txt", bytes), ("t.txt.gz", gzip.compress), ("t.txt.bz2", bz2.compress), ("t.txt.xz", lzma.compress)],
)
def test_plain_and_compressed_files_are_read(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack("Turn the Radio on!\nIt's 5 o’clock\n".encode()))
    lines, counts = read([tmp_path / name])
    assert lines == ["turn the radio on", "it's five o'clock"]
    assert counts == {"files": 1, "lines": 2, "kept": 2}


def test_urls_and_patterns_are_read_in_order(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"the file {name[0]}")
    assert read([tmp_path / "*.txt"])[0] == ["the file a", "the file b"]
    assert read([f"file://{tmp_path}/b.txt"])[0] == ["the file b"]


def test_unusable_lines_are_counted_by_reason(tmp_path):
    lines = [b"good line", b"caf\xff", b"", b"...", "привет".encode(), b"another good line", b"x" * (1 << 20) + b"y"]
    (tmp_path / "t.txt").write_bytes(b"\n".join(lines))
    kept, counts = read([tmp_path / "t.txt"])
    assert kept == ["good line", "another good line"]
    assert counts == {
        "files": 1, "lines": 7, "kept": 2, "undecodable": 1, "empty": 2, "outside-alphabet": 1, "too-long": 1
    }  # fmt: skip


def test_lines_with_special_symbols_are_left_out(tmp_path):
    (tmp_path / "t.txt").write_text("fine <b> words\nbad <s> words\n<unk>\n")
    blocks = list(Text(TextConfig(paths=(str(tmp_path / "t.txt"),)), NormalizerConfig(kind="none")).blocks())
    assert blocks[0].lines == ["fine <b> words"]
    assert blocks[0].counts["special-symbol"] == 2


@functools.cache
def long_text():
    """More than a megabyte, so that bzip2 makes two blocks of it."""
    letters = random.Random(1)
    return "".join("".join(letters.choices("abcdef ", k=60)) + "\n" for _ in range(20_000)).encode()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.variants(1)
def test_damaged_archive_is_read_up_to_the_damage(tmp_path, pack, monkeypatch):
    monkeypatch.setattr("speech.lm.sources._BLOCK_BYTES", 4000)
    ending = {gzip: "gz", bz2: "bz2", lzma: "xz"}[__import__(pack.__module__)]
    packed = pack(long_text())
    (tmp_path / f"t.{ending}").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "whole.txt").write_text("the next file\n")
    lines, counts = read([tmp_path / f"t.{ending}", tmp_path / "whole.txt"])
    assert counts["damaged"] == 1
    assert counts["files"] == 2
    assert lines[-1] == "the next file"
    dropped = sum(counts.get(reason, 0) for reason in ("empty", "undecodable", "outside-alphabet", "too-long"))
    assert counts["lines"] == counts["kept"] + dropped


@pytest.mark.parametrize("path", ["missing.txt", "*.nothing", "nowhere://bucket/file.txt"])
def test_path_without_files_is_named(tmp_path, path):
    with pytest.raises(LmError, match=path.replace("*", r"\*").replace(".", r"\.")):
        read([path if "://" in path else tmp_path / path])


@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_blocks_contain_whole_lines(tmp_path, block_bytes, monkeypatch):
    monkeypatch.setattr("speech.lm.sources._BLOCK_BYTES", block_bytes)
    lines = [f"line number {'a' * (number % 97 + 1)} ends" for number in range(2000)]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    assert read([tmp_path / "t.txt"])[0] == lines


def test_transcripts_come_first_and_characters_include_a_space_symbol(tmp_path):
    (tmp_path / "t.txt").write_text("Radio on\n")
    lines, counts = read([tmp_path / "t.txt"], transcripts=["off", ""], units=Units("character"))
    assert lines == ["o f f", "r a d i o ▁ o n"]
    assert counts == {"files": 1, "lines": 3, "kept": 2, "empty": 1}


def test_lines_that_share_eight_words_with_the_test_set_are_dropped(tmp_path):
    (tmp_path / "t.txt").write_text(
        "And he was not an inclement man and he said so\n"  # nine words of the test set
        "he was not an inclement man and she loved the sea\n"  # seven, and four
        "inclement man and he loved the sea was not he an\n"
        "an inclement man and he loved the sea\n"
    )
    lines, counts = read([tmp_path / "t.txt"], protect=[TEST, "too short to matter"])
    assert lines == [
        "he was not an inclement man and she loved the sea",
        "inclement man and he loved the sea was not he an",
    ]
    assert counts["protected"] == 2
    assert counts["lines"] == 4
    assert len(read([tmp_path / "t.txt"], protect=[TEST], cfg={"allow_test_text": True})[0]) == 4


def test_transcripts_sharing_words_with_the_test_set_are_dropped():
    lines, counts = read([], transcripts=[TEST, "another sentence"], protect=[TEST])
    assert lines == ["another sentence"]
    assert counts["protected"] == 1


@pytest.mark.parametrize("length", [2, 3, 8])
def test_filter_equals_a_search_word_by_word(length):
    chosen = random.Random(length)
    draw = lambda count: [" ".join(chosen.choices("abcde", k=chosen.randint(0, 14))) for _ in range(count)]  # noqa: E731
    protected, text = draw(12 if length < 8 else 400), draw(300)
    if length == 8:
        text += [f"x {line} y" for line in protected[:40]]

    def sequences(line):
        words = line.split()
        return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}

    wanted = set().union(*map(sequences, protected))
    protection = Protection(protected, length)
    assert len(protection) == len(wanted)
    assert protection.found(text).tolist() == [bool(sequences(line) & wanted) for line in text]
    assert protection.found([]).tolist() == []
