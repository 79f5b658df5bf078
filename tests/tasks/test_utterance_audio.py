"""Audio of utterances: pieces of long recordings, members of tars, files without a header; and whole sources."""

import io
import tarfile

import numpy as np
import pytest
import soundfile
import torch
from support import tone, write_tone

import speech.audio
from speech.audio import AudioError, decode_audio
from storage.corpora import Utterance, open_corpus
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.audio import load_utterance_audio, read_range

RATE = 16000
SECONDS = 30
FORMATS = {
    "flac": ("FLAC", "PCM_16", 0.0),
    "wav": ("WAV", "PCM_16", 0.0),
    "sph": ("NIST", "PCM_16", 0.0),
    "ulaw.sph": ("NIST", "ULAW", 0.0),
    "ogg": ("OGG", "VORBIS", 0.0),
    "mp3": ("MP3", None, 1e-6),  # the last bit depends on what was decoded before
    "opus": ("OGG", "OPUS", 0.02),  # its predictors need a while after a seek
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A long recording in every format."""
    folder = tmp_path_factory.mktemp("long")
    wave = tone(SECONDS, rate=RATE, level=0.1)
    for name, (form, subtype, _) in FORMATS.items():
        soundfile.write(folder / f"x.{name}", wave, RATE, format=form, subtype=subtype)
    return folder


@pytest.fixture
def decoded(monkeypatch):
    """How many samples have been decoded so far."""
    counts = []

    class Counting(speech.audio._SoundFile):
        def read(self, frames=-1, *args, **options):
            block = super().read(frames, *args, **options)
            counts.append(len(block))
            return block

    monkeypatch.setattr(speech.audio, "_SoundFile", Counting)
    return counts


def utterance(path, start=0.0, end=None, **fields):
    return Utterance("x", str(path), "T", "s", "c", start=start, end=end, **fields)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.variants(3)
def test_segment_equals_that_part_of_the_recording(recordings, name):
    whole, _ = decode_audio(recordings / f"x.{name}")
    random = np.random.default_rng(0)
    for start in [0.0, 0.0003, *random.uniform(0, SECONDS - 2, 12)]:
        end = start + random.uniform(0.05, 2.0)
        wave, rate = load_utterance_audio(utterance(recordings / f"x.{name}", start, end))
        expected = whole[round(start * rate) : round(end * rate)]
        assert wave.shape == expected.shape
        assert (wave - expected).abs().max() <= FORMATS[name][2]


@pytest.mark.parametrize("name", FORMATS)
def test_segments_do_not_decode_the_whole_recording_each(recordings, name, decoded):
    """Pieces that cover a recording decode it once, and of Opus at most another second each."""
    for second in range(SECONDS):
        load_utterance_audio(utterance(recordings / f"x.{name}", second, second + 1.0))
    extra = SECONDS * RATE if name == "opus" else 0
    assert SECONDS * RATE <= sum(decoded) <= SECONDS * RATE + extra


@pytest.mark.parametrize("name", FORMATS)
def test_segment_is_always_decoded_the_same(recordings, name):
    segments = [load_utterance_audio(utterance(recordings / f"x.{name}", s, s + 1.0))[0] for s in (20, 3, 3.5)]
    backwards = [load_utterance_audio(utterance(recordings / f"x.{name}", s, s + 1.0))[0] for s in (3.5, 3, 20)]
    assert all(torch.equal(a, b) for a, b in zip(segments, reversed(backwards), strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_recordings_are_refused_without_decoding(recordings, name, decoded, tmp_path, capfd):
    content = (recordings / f"x.{name}").read_bytes()
    (tmp_path / f"cut.{name}").write_bytes(content[: len(content) // 2])
    with pytest.raises(AudioError, match="truncated|no sample|cannot be decoded"):
        load_utterance_audio(utterance(tmp_path / f"cut.{name}", 25.0, 26.0))
    assert sum(decoded) <= 2 * RATE
    capfd.readouterr()  # libmpg123 complains there
    wave, _ = load_utterance_audio(utterance(tmp_path / f"cut.{name}", 5.0, 6.0))
    assert len(wave) == RATE


def test_channel_of_a_call_is_read(tmp_path):
    sides = np.stack([tone(1.0, seed=1), tone(1.0, seed=2)], axis=1)
    soundfile.write(tmp_path / "call.sph", sides, RATE, format="NIST", subtype="PCM_16")
    second, _ = load_utterance_audio(utterance(tmp_path / "call.sph", 0.5, 1.0, channel=1))
    np.testing.assert_allclose(second.numpy(), sides[RATE // 2 :, 1], atol=1e-4)


def test_members_of_a_tar_are_read(tmp_path):
    path = write_tone(tmp_path / "x.flac", seconds=1.0)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(path, "a.flac")
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"HELLO"))
    (member,) = open_corpus("webdataset", str(tmp_path / "x.tar"))
    assert torch.equal(load_utterance_audio(member)[0], decode_audio(path)[0])
    row = vars(member) | {"start": 0.25, "end": 0.5}
    assert torch.equal(load_utterance_audio(row)[0], decode_audio(path, start=0.25, end=0.5)[0])


def test_files_without_a_header_are_read(tmp_path):
    samples = (tone(0.5, rate=8000) * 32767).astype("<i2")
    (tmp_path / "x.raw").write_bytes(samples.tobytes())
    wave, rate = load_utterance_audio(utterance(tmp_path / "x.raw", sample_rate=8000))
    assert rate == 8000
    np.testing.assert_array_equal((wave.numpy() * 32768).astype(np.int16), samples)
    assert load_utterance_audio(utterance(tmp_path / "x.raw"))[1] == 16000


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (-1, 5), (90, 20), (0, 1 << 40)])
def test_missing_ranges_are_refused(tmp_path, offset, length):
    (tmp_path / "x").write_bytes(bytes(100))
    with pytest.raises(AudioError):
        read_range(str(tmp_path / "x"), offset, length)
    with pytest.raises(AudioError, match="cannot be read"):
        read_range(str(tmp_path / "none"), 0, 10)


def source(**fields):
    return {"name": "x", "data": {"sources": [fields]}}


def test_sources_configure_layouts_and_their_options():
    config = parse_config(source(kind="gigaspeech", path="x", options={"subset": "S"}))
    assert config.data.sources[0].options == {"subset": "S"}
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.kind: .*did you mean 'tedlium'"):
        parse_config(source(kind="tedlum", path="x"))
    with pytest.raises(ConfigError, match="'gigaspeech' have no option 'colour'; they have: punctuation, subset"):
        parse_config(source(kind="gigaspeech", path="x", options={"colour": "red"}))
    with pytest.raises(ConfigError, match="no option 'where'"):
        parse_config(source(kind="kaldi", path="x", where={"a": "b"}))


def make_sources(folder):
    """A call with segments, as Kaldi has it, and shards of WebDataset."""
    kaldi = folder / "calls"
    write_tone(kaldi / "call.flac", seconds=8.0, channels=2)
    (kaldi / "wav.scp").write_text("call-A call.flac\ncall-B call.flac\n")
    (kaldi / "reco2file_and_channel").write_text("call-A call A\ncall-B call B\n")
    names = [f"{side}{second}" for side in "AB" for second in range(8)]
    (kaldi / "segments").write_text("".join(f"{n} call-{n[0]} {n[1]}.0 {n[1]}.9\n" for n in names))
    (kaldi / "text").write_text("".join(f"{n} HELLO\n" for n in names))
    (kaldi / "utt2spk").write_text("".join(f"{n} {n[0]}\n" for n in names))
    with tarfile.open(folder / "shard-0.tar", "w") as tar:
        for number in range(4):
            tar.add(write_tone(folder / f"{number}.flac", seed=number + 9), f"w{number}.flac")
            info = tarfile.TarInfo(f"w{number}.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"YES"))
    return [
        {"kind": "telephone", "path": str(kaldi), "set": "train"},
        {"kind": "webdataset", "path": str(folder / "shard-{0..0}.tar"), "set": "test"},
    ]


def test_segmented_and_tar_sources_pass_through_the_stages(tmp_path, home):
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages.base import Run

    document = {"name": "pieces", "data": {"sources": make_sources(tmp_path)}, "storage": {"workers": 2}}
    run = Run(parse_config(document), "pieces")
    run_plainly(run, until="shard")
    assert run.result("prepare").record["counts"] == {"read": 20, "written": 20, "quarantined": 0}
    sets = run.result("shard").record["sets"]
    assert {name: entry["utterances"] for name, entry in sets.items()} == {"train": 16, "test": 4}
    assert sets["train"]["seconds"] == pytest.approx(16 * 0.9)
