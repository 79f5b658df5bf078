"""Alignment by a finished model, and the confidences of its words."""

from functools import partial

import numpy as np
import pytest
import torch
from hmm_toys import LEXICON, PHONES, corpus, random_model

from speech.hmm import steps
from speech.hmm.aligner import Aligner, frame_confidences, phone_families
from speech.hmm.config import HmmConfig, StageConfig
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import ModelError, model_digest
from speech.hmm.pronunciations import load_lexicon, save_lexicon, word_pronunciations
from speech.hmm.train import Trainer
from speech.hmm.utterances import InMemoryUtterance, make_shards
from speech.hmm.viterbi import AlignOptions, StatePath
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
        passes.append(([utterance.id for shard in shards for utterance in shard.utterances], dict(adaptations)))
        return inner(self, model, shards, graphs, adaptations)

    monkeypatch.setattr(Aligner, "_align", spy)
    return passes


@pytest.mark.usefixtures("easily_adapted")
def test_speakers_are_adapted_unless_their_transforms_are_known(trained, monkeypatch):
    utterances = corpus(20, seed=4)
    shards = make_shards(utterances, 300)
    aligner = Aligner(trained.model, LEXICON, options=OPTIONS)
    passes = recorded(monkeypatch)
    aligned, transforms = aligner.align(shards)
    assert len(aligned.alignments) == 20
    assert sorted(transforms) == ["s0", "s1"]
    assert [len(names) for names, _ in passes] == [20, 20]
    plain, _ = aligner.align(shards, {who: torch.eye(*matrix.shape) for who, matrix in transforms.items()})
    assert aligned.score > plain.score
    passes.clear()
    _, known = aligner.align(shards, trained.adaptations)
    assert known == trained.adaptations
    assert [(len(names), adapted) for names, adapted in passes] == [(20, trained.adaptations)]
    passes.clear()
    _, half = aligner.align(shards, {"s0": trained.adaptations["s0"]})
    assert passes[0] == ([utterance.id for utterance in utterances if utterance.speaker == "s1"], {})
    assert torch.equal(half["s0"], trained.adaptations["s0"])
    assert torch.equal(half["s1"], transforms["s1"])


@pytest.mark.usefixtures("easily_adapted")
def test_transforms_are_estimated_from_evenly_spaced_utterances(trained, monkeypatch):
    utterances = corpus(20, seed=4)
    aligner = Aligner(trained.model, LEXICON, options=OPTIONS)
    passes = recorded(monkeypatch)
    frames = {
        speaker: sum(utterance.num_frames for utterance in utterances if utterance.speaker == speaker)
        for speaker in ("s0", "s1")
    }
    monkeypatch.setattr("speech.hmm.aligner.ADAPTATION_FRAMES", min(frames.values()) // 3)
    aligned, transforms = aligner.align(make_shards(utterances, 300))
    first, second = (names for names, _ in passes)
    assert len(second) == len(aligned.alignments) == 20
    assert sorted(transforms) == ["s0", "s1"]
    for speaker in frames:
        own = [utterance.id for utterance in utterances if utterance.speaker == speaker]
        every = -(-frames[speaker] // (min(frames.values()) // 3))
        assert every >= 3
        assert [name for name in first if name in own] == own[::every]


def test_speaker_without_frames_fails_alone(trained):
    utterances = [*corpus(4, seed=4), InMemoryUtterance("empty", "s9", torch.zeros(0, 4), ("A",))]
    aligned, _ = Aligner(trained.model, LEXICON, options=OPTIONS).align(make_shards(utterances))
    assert list(aligned.failures) == ["empty"]
    assert len(aligned.alignments) == 4


def test_words_missing_in_the_lexicon_are_noise(trained):
    longest = max(corpus(20, seed=9), key=lambda utterance: utterance.num_frames)
    shards = make_shards([InMemoryUtterance("u", "s0", longest.features, ("A", "NEW"))])
    aligner = Aligner(trained.model, LEXICON, options=AlignOptions(beam=0.0, acoustic_scale=1.0))
    aligned, _ = aligner.align(shards, trained.adaptations)
    assert PHONES.number("SPN") in aligned.alignments["u"].phones.tolist()


def test_wrong_transcript_has_low_confidence_and_score(trained):
    right = corpus(12, seed=3)
    swapped = {"A": "TWO", "AT": "TO", "TO": "A", "TWO": "AT"}
    wrong = [
        InMemoryUtterance(said.id, said.speaker, said.features, tuple(swapped[w] for w in said.words)) for said in right
    ]
    means, scores = [], []
    aligner = Aligner(trained.model, LEXICON, options=OPTIONS)
    for utterances in (right, wrong):
        words, frames = {said.id: said.words for said in utterances}, {said.id: said.num_frames for said in utterances}
        confidences, own = [], []
        for aligned in aligner.aligned_utterances(make_shards(utterances), 0.01):
            assert aligned.text == " ".join(words[aligned.id])
            if alignment := aligned.alignment:
                assert [word.label for word in alignment.words] == list(words[aligned.id])
                assert alignment.units[-1].end == frames[aligned.id]
                assert alignment.duration == pytest.approx(frames[aligned.id] * 0.01)
                confidences += [word.confidence for word in alignment.words]
                own.append(alignment.score)
        means.append(np.mean(confidences))
        scores.append(np.mean(own))
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
        path = StatePath(
            np.array([phone], np.int16), np.array([0], np.int16), np.array([0, 7], np.int32), np.zeros(7, np.int8)
        )
        confidences = frame_confidences(model, frames, path)
        np.testing.assert_allclose(confidences, posteriors[:, of_pdf == of_phone[phone]].sum(1), rtol=1e-5)
        total = total + confidences
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_lexicon_with_probabilities_survives_a_file_round_trip(tmp_path):
    lexicon = Lexicon({word: [Pronunciation(phones) for phones in variants] for word, variants in LEXICON.items()})
    spoken = GraphOptions(0.37, {("TO", ("T", "AH0")): 0.25}, {"TO": 0.9})
    save_lexicon(tmp_path, lexicon, spoken)
    again, options = load_lexicon(tmp_path)
    assert word_pronunciations(again, LEXICON) == {w: sorted(variants) for w, variants in LEXICON.items()}
    assert options == spoken
    (tmp_path / "silence.json").write_text("{}")
    with pytest.raises(ModelError, match="no lexicon of an alignment"):
        load_lexicon(tmp_path)


def test_digest_of_a_model_depends_on_its_weights(tmp_path):
    for seed in (1, 1, 2):
        random_model(np.random.default_rng(seed)).save(tmp_path / str(seed))
        random_model(np.random.default_rng(seed)).save(tmp_path / f"{seed} again")
    assert model_digest(tmp_path / "1") == model_digest(tmp_path / "1 again") != model_digest(tmp_path / "2")
