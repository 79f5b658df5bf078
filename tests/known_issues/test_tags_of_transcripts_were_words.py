"""`<unk>`, `[noise]` and `(laughs)` were trained on as words, except in TED-LIUM's layout."""

import json

import pytest
from support import write_tone

from storage.corpora import open_corpus
from storage.corpora.base import NOT_MEANT
from storage.corpora.tags import OTHERS, Tags
from tasks.stages.quarantined import left_out_lines
from tasks.stages.sources import left_out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<unk> one", "one"),
        ("[noise] two", "two"),
        ("three <sil>", "three"),
        ("(laughs) four", "four"),
        ("<s> five </s>", "five"),
        ("<SPOKEN_NOISE> six", "six"),
        ("{BREATH} seven [background noise], eight", "seven , eight"),
        ("nine *clears throat* ten (audience laughing)", "nine ten"),
        ("the(2) cat ++UM++ !SIL sat", "the cat sat"),
        ("[laughter-yeah] sure", "yeah sure"),
        ("你好[笑]吗（笑声）", "你好 吗"),
        ("<шум> да", "да"),
        ("<i>very</i> good", "very good"),
        ("she (my [noise] sister) left", "she (my sister) left"),
    ],
)
def test_tags_are_removed(text, words):
    tags = Tags()
    assert tags.without(text) == words
    assert tags.counts.total() >= 1


@pytest.mark.parametrize(
    "text",
    [
        "he (my brother) came",
        "in 1795 (the year before)",
        "the (quiet) man",
        "a < b and c > d",
        "x <3 and y> 2",
        "th[at]- colo[u]r",
        "two * three * four",
        "c++ and a++b",
        "wait! SIL said",
        "it cost (2) coins",
        "an [open bracket",
        "  spaces  as they were",
    ],
)
def test_words_in_brackets_are_kept(text):
    tags = Tags()
    assert tags.without(text) == text
    assert not tags.counts


def make_corpus(kind, folder, texts):
    """Utterances u0, u1, … with these texts."""
    for number in range(len(texts)):
        write_tone(folder / f"u{number}.wav")
    if kind == "kaldi":
        (folder / "wav.scp").write_text("".join(f"u{n} u{n}.wav\n" for n in range(len(texts))))
        (folder / "text").write_text("".join(f"u{n} {text}\n" for n, text in enumerate(texts)))
    elif kind == "sidecar":
        for number, text in enumerate(texts):
            (folder / f"u{number}.txt").write_text(text)
    else:
        rows = [{"audio_filepath": f"u{n}.wav", "text": text} for n, text in enumerate(texts)]
        (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "m.jsonl"
    return folder


@pytest.mark.parametrize("kind", ["kaldi", "sidecar", "nemo", "table"])
def test_every_layout_removes_and_counts_tags(tmp_path, kind):
    path = make_corpus(kind, tmp_path, ["<unk> one", "[noise]", "two [noise]"])
    reader = open_corpus(kind, str(path))
    assert [u.text for u in reader] == ["one", "two"]
    assert [(p.id, p.reason, p.detail) for p in reader.problems] == [("u1", "no-words", "[noise]")]
    assert "no-words" in NOT_MEANT
    assert reader.tags.counts == {"[noise]": 2, "<unk>": 1}
    assert left_out_lines(left_out([reader])) == ["tags removed from transcripts: 2 [noise], 1 <unk>"]
    assert [u.text for u in open_corpus(kind, str(path), tags="keep")] == ["<unk> one", "[noise]", "two [noise]"]
    with pytest.raises(ValueError, match="use remove or keep"):
        open_corpus(kind, str(path), tags="drop")


def test_inspect_names_the_tags(tmp_path, invoke):
    path = make_corpus("kaldi", tmp_path, ["<unk> one", "two", "three"])
    report = json.loads(invoke("corpus", "inspect", str(path), "--json").stdout.splitlines()[-1])
    assert report["tags"] == {"<unk>": 1}
    assert "1 <unk>" in invoke("corpus", "inspect", str(path)).stdout


def test_number_of_different_tags_is_bounded():
    tags = Tags()
    for number in range(10_000):
        tags.without(f"word [inaudible {number}]")
    assert len(tags.counts) < 1000
    assert tags.counts.total() == 10_000
    assert tags.counts[OTHERS] > 9000


@pytest.mark.parametrize("character", "<[{(*+!")
def test_long_lines_of_brackets_take_linear_time(character):
    text = f"a {character * 200_000} b"
    assert Tags().without(text).startswith("a")
