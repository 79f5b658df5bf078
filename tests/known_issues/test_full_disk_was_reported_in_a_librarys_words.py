"""On a full disk, numpy said "697463 requested and 654320 written", memory maps ended the process, OpenFst nothing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import ROOT, fill, small_disk

from speech.hmm.decoding_graph import WordTable, grammar
from speech.hmm.fst_arrays import FstArrays, arc_records, from_arcs
from speech.lm import NgramConfig, Sources, TextConfig, estimate
from speech.lm.arrays import make_array, save_array
from storage.disks import disk_trouble, needed_bytes
from storage.objects import ObjectStore
from storage.retries import DiskError, disk_named


@pytest.fixture
def disk(tmp_path):
    """A file system of two megabytes."""
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def graph_of(states):
    """A chain."""
    arcs = arc_records(1, 1, 0.0, np.arange(1, states))
    finals = np.full(states, np.inf, np.float32)
    finals[-1] = 0
    return from_arcs(0, finals, np.arange(states - 1), arcs)


def put(array, path):
    with path.open("wb") as file:
        array.tofile(file)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: np.save(str(path), np.zeros(500_000)),
        lambda path: put(np.zeros(500_000), path),
        lambda path: graph_of(200_000).write(path),
    ],
)
def test_short_write_of_numpy_is_a_full_disk(disk, write):
    said = rf'^{disk}/file(\.npy)?: no space is left on the disk of {disk}, "\d+ requested and \d+ written" \(0 B of '
    with pytest.raises(DiskError, match=said) as caught, disk_named(disk):
        write(disk / "file")
    assert disk_trouble(caught.value.__cause__) == errno.ENOSPC


@pytest.mark.parametrize(
    "write", [lambda path: save_array(path, np.zeros(500_000)), lambda path: make_array(path, "<f8", 500_000)]
)
def test_array_on_disk_says_what_it_needs(disk, write):
    said = rf"^{disk}/x\.npy: no space is left on the disk of {disk} for 4\.0 MB \("
    with pytest.raises(DiskError, match=said), disk_named(disk):
        write(disk / "x.npy")


def test_array_that_fits_is_whole(tmp_path):
    whole = make_array(tmp_path / "x.npy", np.int32, 1000)
    whole[:] = np.arange(1000)
    whole.flush()
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.arange(1000))
    assert len(make_array(tmp_path / "none.npy", np.int32, 0)) == 0


def test_object_says_what_it_needs(disk):
    with pytest.raises(DiskError, match=rf"no space is left on the disk of {disk}/objects for 5\.0 MB \(") as caught:
        ObjectStore(disk / "objects").write("x", bytes(5_000_000))
    assert needed_bytes(caught.value) == 5_000_000


@pytest.mark.parametrize("room", [100_000, 400_000, 700_000])
@pytest.mark.variants(1)
def test_estimation_of_a_language_model_names_the_full_disk(disk, tmp_path, room):
    rng = np.random.default_rng(1)
    words = [" ".join(f"w{number}" for number in row) for row in rng.integers(0, 3000, (4000, 8)).tolist()]
    (tmp_path / "text").write_text("\n".join(words))
    fill(disk, leave=room)
    (disk / "lm").mkdir()
    cfg = NgramConfig(order=3, text=TextConfig(paths=[str(tmp_path / "text")], allow_test_text=True))
    said = rf"^{disk}/lm.*no space is left on the disk of .* for [\d.]+ [kM]?B"
    with pytest.raises(DiskError, match=said), disk_named(disk):
        estimate(Sources(), cfg, disk / "lm")


def test_graph_on_a_full_disk_says_so(disk, tmp_path, monkeypatch):
    fst = graph_of(200_000).vector()
    words = WordTable.of([f"word{number}" for number in range(20_000)])
    arpa = tmp_path / "lm.arpa"
    unigrams = "".join(f"-4\t{word}\n" for word in words.words)
    arpa.write_text(f"\\data\\\nngram 1=20002\n\n\\1-grams:\n-99\t<s>\n-1\t</s>\n{unigrams}\n\\end\\\n")
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    for write in (lambda: FstArrays.of(fst), lambda: grammar(arpa, words)):
        hog = fill(disk, leave=500_000)
        with pytest.raises(DiskError, match=rf"^{disk}/.*: no space is left"), disk_named(disk):
            write()
        hog.unlink()


def test_output_of_a_command_names_its_file(disk, tmp_path):
    from flows.cli.transcripts import open_sink
    from recognition.transcriber import Transcript

    fill(disk)
    said = rf"^{disk}/out\.txt: no space is left on the disk of {disk} for 500\.0 kB \(0 B"
    transcript = Transcript("word " * 100_000, 1.0, 1.0)
    sink = open_sink("text", disk / "out.txt", "model", several=False)
    with pytest.raises(DiskError, match=said), disk_named(tmp_path), sink:
        sink.add(disk / "a.wav", Path("a"), transcript)
    assert [path.name for path in disk.iterdir()] == ["hog"]


def test_redirected_output_is_named(disk, tmp_path):
    fill(disk)
    program = (
        "import os, sys; from pathlib import Path; from storage.retries import disk_named\n"
        "try:\n"
        f"    with disk_named(Path({str(tmp_path)!r})):\n"
        "        sys.stdout.write('x' * 100_000); sys.stdout.flush()\n"
        "except OSError as error:\n"
        "    sys.stderr.write(str(error)); sys.stderr.flush(); os._exit(3)\n"
    )
    (tmp_path / "program.py").write_text(program)
    with (disk / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, tmp_path / "program.py"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert (done.returncode, done.stderr.partition(" (")[0]) == (3, f"{disk}/out: no space is left on its disk")
