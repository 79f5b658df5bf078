"""Decoding a set: every utterance once, in the order of the index, whatever the batches."""

from dataclasses import replace

import pytest
import torch

from recognition.inference import decode_set, open_set
from recognition.recognizer import Recognizer
from speech.audio import encode_flac
from speech.decoding import DECODERS, GreedyConfig
from storage.batching import BatchError
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard

GREEDY = GreedyConfig()


def decode(trained, url, tmp_path, **options):
    recognizer = Recognizer.load(trained.bundle, options.pop("decode", GREEDY))
    dataset = open_set(url, recognizer.spec.sample_rate, tmp_path / "cache")
    return list(decode_set(recognizer, dataset, **options).values())


def test_a_trained_model_recognizes_the_set(trained, corpus, tmp_path):
    done = []
    entries = decode(trained, corpus.url("valid"), tmp_path, batch_seconds=2.0, on_progress=lambda *n: done.append(n))
    assert [entry.id for entry in entries] == [sample.id for sample in corpus.valid]
    assert [entry.hyp for entry in entries] == [entry.ref for entry in entries]
    for entry, sample in zip(entries, corpus.valid, strict=True):
        assert entry.ref == sample.row["text"]
        assert (entry.speaker, entry.domain) == (sample.row["speaker"], "tones")
        assert entry.duration == pytest.approx(sample.row["duration"])
        assert 0.3 < entry.confidence <= 1.0
        assert entry.score <= 0.0
    counts = [count for count, _ in done]
    assert counts == sorted(counts)
    assert done[-1] == (12, 12)
    assert len(done) > 1


@pytest.mark.parametrize("kind", ["greedy", "beam"])
def test_hypotheses_do_not_depend_on_batching(trained, corpus, tmp_path, kind):
    cfg = DECODERS[kind]()
    one_by_one = decode(trained, corpus.url("valid"), tmp_path, decode=cfg, batch_seconds=0.1)
    all_at_once = decode(trained, corpus.url("valid"), tmp_path, decode=cfg, batch_seconds=1000)
    assert [entry.hyp for entry in one_by_one] == [entry.hyp for entry in all_at_once]
    assert [entry.score for entry in one_by_one] == pytest.approx([entry.score for entry in all_at_once], abs=1e-3)


def test_batches_stay_the_same_when_some_are_known(trained, corpus, tmp_path):
    recognizer = Recognizer.load(trained.bundle, GREEDY)
    dataset = open_set(corpus.url("valid"), recognizer.spec.sample_rate, tmp_path / "cache")
    batches = []
    whole = decode_set(recognizer, dataset, batch_seconds=2.0, on_decoded=batches.append)
    assert len(batches) > 2
    for known in (batches[0], batches[0] | batches[2], dict(list(batches[1].items())[1:])):
        again = []
        marked = {row: replace(entry, hyp="known") for row, entry in known.items()}
        decoded = decode_set(recognizer, dataset, batch_seconds=2.0, known=marked, on_decoded=again.append)
        assert again == [batch for batch in batches if not batch.keys() <= known.keys()]
        kept = known.keys() - {row for batch in again for row in batch}
        assert decoded == {row: marked[row] if row in kept else entry for row, entry in whole.items()}


def write_waves(url, waves, rate):
    samples = []
    for number, wave in enumerate(waves):
        row = {
            "duration": len(wave) / rate,
            "num_frames": len(wave),
            "sample_rate": rate,
            "text": "zz not in the tokens",
        }
        samples.append(Sample(f"u{number}", {"flac": encode_flac(wave, rate)}, row))
    store = ObjectStore(url)
    build_index([write_shard(store, "0.tar", samples, "flac")] if samples else [], {"payload": "flac"}).write(store)


def test_utterances_shorter_than_a_frame_give_no_words(trained, tmp_path):
    """Also alone in a batch; and transcripts may contain words outside the model's vocabulary."""
    write_waves(str(tmp_path / "set"), [torch.zeros(80), torch.zeros(4000), torch.zeros(1)], 8000)
    for batch_seconds in (0.01, 100):
        entries = decode(trained, str(tmp_path / "set"), tmp_path, batch_seconds=batch_seconds)
        assert [entry.hyp for entry in entries if entry.duration < 0.02] == ["", ""]
        assert entries[0].ref == "zz not in the tokens"


def test_audio_of_another_sample_rate_is_resampled(trained, corpus, tmp_path):
    from speech.audio import decode_audio, resample

    waves = [resample(decode_audio(sample.members["flac"])[0], 8000, 16000) for sample in corpus.valid]
    write_waves(str(tmp_path / "set"), waves, 16000)
    entries = decode(trained, str(tmp_path / "set"), tmp_path)
    assert [entry.hyp for entry in entries] == [sample.row["text"] for sample in corpus.valid]


def test_set_in_a_remote_object_store_is_decoded(trained, corpus, tmp_path):
    remote = ObjectStore(f"memory://{tmp_path.name}/valid")
    local = ObjectStore(corpus.url("valid"))
    for name in local.list():
        remote.write(name, local.read(name))
    entries = decode(trained, remote.url, tmp_path)
    assert [entry.hyp for entry in entries] == [sample.row["text"] for sample in corpus.valid]
    assert list((tmp_path / "cache").glob("*.tar"))
    remote.delete_tree("")


def test_an_empty_set_is_refused(trained, tmp_path):
    write_waves(str(tmp_path / "set"), [], 8000)
    with pytest.raises(BatchError, match="empty"):
        decode(trained, str(tmp_path / "set"), tmp_path)
