"""The readers on real public corpora: every utterance, every speaker, and readable audio."""

from pathlib import Path

import pytest
import soundfile

from storage.corpora import open_corpus

CASES = [
    ("librispeech", "LibriSpeech/train-clean-5", {}, 1423, 24),
    ("librispeech", "LibriSpeech/dev-clean-5", {}, 96, 4),
    ("kaldi", "speechocean762/train", {}, 2148, None),
    ("kaldi", "speechocean762/valid", {}, 300, None),
    ("table", "fsdd/metadata.csv", {"where": {"part": "train"}}, 1800, 4),
    ("table", "fsdd/metadata.csv", {"where": {"part": "valid"}}, 200, 4),
    ("table", "fsdd", {}, 2000, 4),
]


@pytest.mark.parametrize(("kind", "path", "options", "count", "num_speakers"), CASES)
def test_every_utterance_is_read(shared_data, kind, path, options, count, num_speakers):
    reader = open_corpus("auto", str(shared_data / path), **options)
    assert type(reader) is type(open_corpus(kind, str(shared_data / path)))
    utterances = list(reader)
    assert len(utterances) == count
    assert reader.problems == []
    assert len({utterance.id for utterance in utterances}) == count
    assert all(utterance.text and utterance.speaker for utterance in utterances)
    if num_speakers is not None:
        assert len({utterance.speaker for utterance in utterances}) == num_speakers
    for utterance in utterances[:: max(1, count // 10)]:
        assert soundfile.info(utterance.audio).frames > 0
    assert len(set(reader.files())) > count


def test_known_utterances_are_read_correctly(shared_data):
    libri = next(iter(open_corpus("librispeech", str(shared_data / "LibriSpeech" / "dev-clean-5"))))
    assert libri.id == "1737-146161-0000"
    assert libri.speaker == "1737"
    kaldi = next(iter(open_corpus("kaldi", str(shared_data / "speechocean762" / "valid"))))
    assert (kaldi.id, kaldi.text, kaldi.speaker) == ("000540001", "MIKE LOVE GARDEN", "so0054")
    assert Path(kaldi.audio) == shared_data / "speechocean762" / "WAVE" / "SPEAKERso0054" / "000540001.opus"
    digits = next(iter(open_corpus("table", str(shared_data / "fsdd"))))
    assert (digits.id, digits.text, digits.speaker, digits.duration) == ("0_george_0", "zero", "george", 0.298)


def test_folder_of_subsets_is_read(shared_data):
    splits = [utterance.split for utterance in open_corpus("auto", str(shared_data / "LibriSpeech"))]
    assert splits.count("train-clean-5") == 1423
    assert splits.count("dev-clean-5") == 96


def test_corpora_are_read_by_kind(shared_data):
    digits = list(open_corpus("fsdd", str(shared_data / "fsdd")))
    assert {(u.split, u.text) for u in digits[:1]} == {("test", "zero")}
    assert [sum(u.split == name for u in digits) for name in ("train", "test")] == [1800, 200]
    parts = {u.id: u.split for u in open_corpus("table", str(shared_data / "fsdd"), columns={"split": "part"})}
    assert all({"valid": "test", "train": "train"}[parts[u.id] or ""] == u.split for u in digits)
    speech = list(open_corpus("speechocean762", str(shared_data / "speechocean762")))
    assert [sum(u.split == name for u in speech) for name in ("train", "valid")] == [2148, 300]
