"""Two recordings in a tar whose names have dots became one sample, which "has no text"."""

import io
import json
import tarfile

import pytest
from support import write_tone

from storage.corpora import open_corpus


@pytest.fixture
def make(tmp_path):
    """Makes a tar of these members; texts are `text of NAME`."""
    audio = write_tone(tmp_path / "a.wav").read_bytes()

    def write(*names):
        with tarfile.open(tmp_path / "t.tar", "w") as tar:
            for name in names:
                text = f"text of {name}"
                content = json.dumps({"text": text}) if name.endswith("json") else text
                data = audio if name.endswith("wav") else content.encode()
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return open_corpus("webdataset", str(tmp_path / "t.tar"))

    return write


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (
            ["12 Track 2.0.wav", "12 Track 2.0.txt", "12 Track 2.1.wav", "12 Track 2.1.txt"],
            ["12 Track 2.0", "12 Track 2.1"],
        ),
        (["a/v1.0.wav", "a/v1.0.json", "a/v1.1.txt", "a/v1.1.wav"], ["a/v1.0", "a/v1.1"]),
        (["x.y.wav", "x.z.wav", "x.y.txt", "x.z.txt"], ["x.y", "x.z"]),
        (["Dr. No.wav", "Dr. No.txt", "b.wav", "b.txt"], ["Dr. No", "b"]),
        (["k.left.wav", "k.right.wav", "k.txt"], ["k"]),
        (["k.left.wav", "k.json", "k.meta.json"], ["k"]),
        (["k.wav", "k.txt", "k.v2.wav", "k.v2.txt"], ["k", "k.v2"]),
    ],
)
def test_keys_with_dots_are_told_from_several_suffixes(make, names, ids):
    reader = make(*names)
    assert [u.id for u in reader] == ids
    assert reader.problems == []


def test_sample_without_text_does_not_spoil_its_neighbours(make):
    reader = make("s 2.0.wav", "s 2.0.txt", "s 2.1.wav", "s 2.2.txt")
    assert [(u.id, u.text) for u in reader] == [("s 2.0", "text of s 2.0.txt")]
    assert {p.id: p.reason for p in reader.problems} == {"s 2.1": "missing-transcript", "s 2.2": "missing-audio"}
