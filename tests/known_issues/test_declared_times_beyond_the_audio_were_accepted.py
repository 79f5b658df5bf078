"""A manifest promised 30 seconds, its recording had 6: the transcript of all was trained on what is left."""

import json

import pytest
from support import write_tone

from speech.text import TextNormalizer
from storage.corpora import open_corpus
from tasks.config.data import DataConfig
from tasks.stages.prepare import Checked, check


def reasons(kind, path):
    """What is wrong with each utterance of a corpus, and with its entries; empty for those that can be used."""
    data = DataConfig.model_validate({"sources": [{"kind": kind, "path": str(path)}]})
    reader = open_corpus(kind, str(path))
    checked = [check(utterance, data, TextNormalizer(data.normalizer)) for utterance in reader]
    outcomes = ["" if isinstance(outcome, Checked) else f"{outcome.reason}: {outcome.detail}" for outcome in checked]
    return outcomes + [f"{problem.reason}: {problem.detail}" for problem in reader.problems]


@pytest.fixture
def audio(tmp_path):
    return write_tone(tmp_path / "a.wav", seconds=2.0)


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"duration": 30.0}, "bad-segment: the corpus declares 30 s, and the audio has 2.000 s"),
        ({"duration": 2.1}, ""),
        ({"duration": 1.0}, ""),
        ({"offset": 1.0, "duration": 5.0}, "bad-segment: the segment from 1 s to 6 s ends after the audio"),
        ({"offset": 1.9, "duration": 0.5}, "bad-segment"),
        ({"offset": 1.0, "duration": 1.05}, ""),
        ({"offset": 7.0, "duration": 1.0}, "empty"),
        ({"offset": -1.0, "duration": 1.0}, "bad-line"),
    ],
)
@pytest.mark.parametrize("kind", ["nemo", "table"])
def test_times_that_the_audio_lacks_are_refused(tmp_path, audio, kind, times, reason):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"audio_filepath": audio.name, "text": "one", **times}) + "\n")
    (refusal,) = reasons(kind, path)
    assert refusal.startswith(reason)
    assert bool(refusal) == bool(reason)


def test_segments_of_every_layout_are_compared_with_the_audio(tmp_path, audio):
    (tmp_path / "wav.scp").write_text("r a.wav\n")
    (tmp_path / "segments").write_text("a r 0 1\nb r 1 3\nc r 1 2.05\n")
    (tmp_path / "text").write_text("a one\nb two\nc three\n")
    assert [refusal[:11] for refusal in reasons("kaldi", tmp_path)] == ["", "bad-segment", ""]
    (tmp_path / "stm").mkdir()
    (tmp_path / "stm" / "a.stm").write_text("a 1 s 0.0 1.0 <o> one\na 1 s 1.0 9.0 <o> two\n")
    (tmp_path / "wav").mkdir()
    audio.rename(tmp_path / "wav" / "a.wav")
    assert [refusal[:11] for refusal in reasons("tedlium", tmp_path)] == ["", "bad-segment"]


def test_supervision_long_before_its_recording_is_refused(tmp_path, audio):
    recording = {"id": "r", "duration": 2.0, "sources": [{"type": "file", "channels": [0], "source": "a.wav"}]}
    cuts = [
        {"id": str(n), "start": 0, "recording": recording, "supervisions": [{"start": s, "duration": 1.0, "text": "x"}]}
        for n, s in enumerate((0.0, -0.01, -0.9))
    ]
    (tmp_path / "cuts.jsonl").write_text("".join(json.dumps(cut) + "\n" for cut in cuts))
    refusals = reasons("lhotse", tmp_path)
    assert refusals[:2] == ["", ""]
    assert refusals[2].startswith("bad-segment: it starts 0.9 s before")
