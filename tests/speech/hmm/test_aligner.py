"""Alignment by a finished model, and the confidences of its words."""

from functools import partial

import numpy as np
import pytest
import torch
from hmm_toys import LEXICON, PHONES, corpus, random_model

from speech.hmm import steps
from speech.hmm.aligner import Aligner
from speech.hmm.confidence import frame_confidences, phone_families, timed_units
from speech.hmm.config import HmmConfig, StageConfig
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import ModelError
from speech.hmm.pronunciations import load_lexicon, save_lexicon, word_pronunciations
from speech.hmm.steps import AlignOptions
from speech.hmm.train import Trainer
from speech.hmm.utterances import InMemoryUtterance, make_shards
from speech.lexicon import Lexicon, Pronunciation

STAGE = StageConfig(leaves=20, gaussians=50, iterations=3, growing=2, realign=(2,), estimate=(2,))
CONFIG = HmmConfig(
    mono=StageConfig(gaussians=40, iterations=8, growing=6, realign=(2, 3, 4, 5, 6, 7, 8)),
    tri=STAGE, lda=STAGE, sat=STAGE, lda_context=1, lda_dim=8, leaf_frames=5, minimum_occupancy=3,
    beam=100.0, acoustic_scale=1.0,
)  # fmt: skip
OPTIONS = AlignOptions(beam=100.0, acoustic_scale=1.0)


@pytest.fixture(autouse=True, scope="module")
def several_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speech.hmm.utterances.SHARD_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def trained():
    return Trainer(corpus(), LEXICON, CONFIG).run("sat")


@pytest.fixture
def easily_adapted(monkeypatch):
    """Transforms are estimated from little speech."""
    monkeypatch.setattr(steps, "estimate_fmllr", partial(steps.estimate_fmllr, minimum=50))


def recorded(monkeypatch):
    """The utterances and the speakers' transforms of each pass of the aligners."""
    passes, inner = [], Aligner._align

    def spy(self, model, shards, graphs, adaptations):
        passes.append(([one.id for shard in shards for one in shard.utterances], dict(adaptations)))
        return inner(self, model, shards, graphs, adaptations)

    monkeypatch.setattr(Aligner, "_align", spy)
    return passes


@pytest.mark.usefixtures("easily_adapted")
def test_speakers_are_adapted_unless_their_transforms_are_known(trained, monkeypatch):
    utterances = corpus(20, seed=4)
    shards = make_shards(utterances, 300)
    aligner = Aligner(trained.model, LEXICON, options=OPTIONS)
    passes = recorded(monkeypatch)
    own = aligner.align(shards)
    assert len(own.aligned.alignments) == 20
    assert sorted(own.adaptations) == ["s0", "s1"]
    assert [len(names) for names, _ in passes] == [20, 20]
    plain = aligner.align(shards, {who: torch.eye(*one.shape) for who, one in own.adaptations.items()})
    assert own.aligned.score > plain.aligned.score
    passes.clear()
    known = aligner.align(shards, trained.adaptations)
    assert known.adaptations == trained.adaptations
    assert [(len(names), adapted) for names, adapted in passes] == [(20, trained.adaptations)]
    passes.clear()
    half = aligner.align(shards, {"s0": trained.adaptations["s0"]})
    assert passes[0] == ([one.id for one in utterances if one.speaker == "s1"], {})
    assert torch.equal(half.adaptations["s0"], trained.adaptations["s0"])
    assert torch.equal(half.adaptations["s1"], own.adaptations["s1"])


@pytest.mark.usefixtures("easily_adapted")
def test_transforms_are_estimated_from_evenly_spaced_utterances(trained, monkeypatch):
    utterances = corpus(20, seed=4)
    aligner = Aligner(trained.model, LEXICON, options=OPTIONS)
    passes = recorded(monkeypatch)
    frames = {speaker: sum(one.num_frames for one in utterances if one.speaker == speaker) for speaker in ("s0", "s1")}
    monkeypatch.setattr("speech.hmm.aligner.ADAPTATION_FRAMES", min(frames.values()) // 3)
    found = aligner.align(make_shards(utterances, 300))
    first, second = (names for names, _ in passes)
    assert len(second) == len(found.aligned.alignments) == 20
    assert sorted(found.adaptations) == ["s0", "s1"]
    for speaker in frames:
        own = [one.id for one in utterances if one.speaker == speaker]
        every = -(-frames[speaker] // (min(frames.values()) // 3))
        assert every >= 3
        assert [name for name in first if name in own] == own[::every]


def test_speaker_without_frames_fails_alone(trained):
    utterances = [*corpus(4, seed=4), InMemoryUtterance("empty", "s9", torch.zeros(0, 4), ("A",))]
    found = Aligner(trained.model, LEXICON, options=OPTIONS).align(make_shards(utterances))
    assert list(found.aligned.failures) == ["empty"]
    assert len(found.aligned.alignments) == 4


def test_words_missing_in_the_lexicon_are_noise(trained):
    one = max(corpus(20, seed=9), key=lambda one: one.num_frames)
    shards = make_shards([InMemoryUtterance("u", "s0", one.features, ("A", "NEW"))])
    found = (
        Aligner(trained.model, LEXICON, options=AlignOptions(beam=0.0, acoustic_scale=1.0))
        .align(shards, trained.adaptations)
        .aligned
    )
    assert PHONES.number("SPN") in found.alignments["u"].phones.tolist()


def test_wrong_transcript_has_low_confidence_and_score(trained):
    right = corpus(12, seed=3)
    swapped = {"A": "TWO", "AT": "TO", "TO": "A", "TWO": "AT"}
    wrong = [
        InMemoryUtterance(one.id, one.speaker, one.features, tuple(swapped[w] for w in one.words)) for one in right
    ]
    means, scores = [], []
    for utterances in (right, wrong):
        shards = make_shards(utterances, 10_000)
        found = Aligner(trained.model, LEXICON, options=OPTIONS).align(shards, trained.adaptations).aligned
        scores.append(found.score)
        values = []
        frames = shards[0].features(trained.model.chain, trained.adaptations)
        for one, own in zip(utterances, frames, strict=True):
            if alignment := found.alignments.get(one.id):
                confidences = frame_confidences(trained.model, own, alignment)
                words, phones = timed_units(alignment, one.words, PHONES.names, confidences, 0.01)
                assert [word.word for word in words] == list(one.words)
                assert phones[-1].start + phones[-1].duration == pytest.approx(one.num_frames * 0.01)
                values += [word.confidence for word in words]
        means.append(np.mean(values))
    assert means[0] > 0.8
    assert means[1] < 0.5
    assert scores[1] < scores[0] - 1


def test_confidences_of_all_phones_sum_to_one():
    model = random_model(np.random.default_rng(2))
    frames = torch.randn(7, 3)
    of_phone, of_pdf = phone_families(model)
    assert len(of_pdf) == model.gmm.num_pdfs
    assert of_phone[PHONES.number("AH0")] != of_phone[PHONES.number("AE1")]
    posteriors = model.gmm.log_likelihoods(frames).softmax(1).numpy()
    total = 0.0
    for phone in range(1, len(PHONES) + 1):
        alignment = steps.Alignment(
            np.array([phone], np.int16), np.array([0], np.int16), np.array([0, 7], np.int32), np.zeros(7, np.int8)
        )
        found = frame_confidences(model, frames, alignment)
        np.testing.assert_allclose(found, posteriors[:, of_pdf == of_phone[phone]].sum(1), rtol=1e-5)
        total = total + found
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_lexicon_with_probabilities_survives_a_file_round_trip(tmp_path):
    lexicon = Lexicon({word: [Pronunciation(phones) for phones in found] for word, found in LEXICON.items()})
    spoken = GraphOptions(0.37, {("TO", ("T", "AH0")): 0.25}, {"TO": 0.9})
    save_lexicon(tmp_path, lexicon, spoken)
    again, options = load_lexicon(tmp_path)
    assert word_pronunciations(again, LEXICON) == {w: sorted(found) for w, found in LEXICON.items()}
    assert options == spoken
    (tmp_path / "silence.json").write_text("{}")
    with pytest.raises(ModelError, match="no lexicon of an alignment"):
        load_lexicon(tmp_path)
