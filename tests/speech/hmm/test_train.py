"""Training on toy speech: likelihoods rise, words are recognized, an interrupted training gives the same model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hmm_toys import LEXICON, arpa, corpus

from speech.hmm.checkpoint import load_checkpoint, save_checkpoint
from speech.hmm.config import HmmConfig, StageConfig
from speech.hmm.decode import DecodeOptions, GraphSearch, decode_plain, decode_speaker, speaker_transform
from speech.hmm.decoding_graph import WordTable, compose_lexicon, decoding_graph, grammar, lexicon_fst
from speech.hmm.model import HmmModel, ModelError
from speech.hmm.steps import accumulate_shard
from speech.hmm.train import Trainer, TrainingError
from speech.hmm.utterances import InMemoryUtterance, Shard, make_shards

STAGE = StageConfig(leaves=20, gaussians=50, iterations=4, growing=2, realign=(3,), estimate=(2, 4))
CONFIG = HmmConfig(
    mono=StageConfig(gaussians=40, iterations=10, growing=8, realign=(2, 3, 4, 5, 6, 7, 8, 9, 10)),
    tri=STAGE, lda=STAGE, sat=STAGE, lda_context=1, lda_dim=8, leaf_frames=5, minimum_occupancy=3,
    beam=100.0, acoustic_scale=1.0,
)  # fmt: skip
PARTS = ("weights", "means", "variances")


class Interrupted(Exception):
    """Raised in the middle of training."""


@pytest.fixture(autouse=True, scope="module")
def several_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speech.hmm.utterances.SHARD_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hmm")
    reports = []
    result = Trainer(corpus(), LEXICON, CONFIG, folder, reports.append).run()
    return result, reports, folder


def test_likelihood_rises_within_each_stage(trained):
    _, reports, _ = trained
    assert [report.iteration for report in reports] == [*range(1, 11), *range(1, 5), *range(1, 5), *range(1, 5)]
    for name in ("mono", "tri", "lda", "sat"):
        values = [report.log_likelihood for report in reports if report.stage == name]
        assert values[-1] > values[0]
    assert all(report.failures == 0 for report in reports)
    assert reports[-1].gaussians > reports[0].gaussians


def test_interrupted_training_gives_the_same_model(tmp_path):
    few = corpus(16)
    whole = Trainer(few, LEXICON, CONFIG).run()

    def interrupt_at(limit):
        done = []

        def report(progress):
            done.append(progress)
            if len(done) == limit:
                raise Interrupted

        return report

    for limit in (12, 7):  # in the second iteration of `tri`, and the fifth after that, in `lda`
        with pytest.raises(Interrupted):
            Trainer(few, LEXICON, CONFIG, tmp_path, interrupt_at(limit)).run()
    again = Trainer(few, LEXICON, CONFIG, tmp_path).run()
    for part in PARTS:
        torch.testing.assert_close(getattr(again.model.gmm, part), getattr(whole.model.gmm, part), rtol=0, atol=0)
    np.testing.assert_array_equal(again.model.transitions.log_probs, whole.model.transitions.log_probs)


def test_finished_training_is_read_and_not_repeated(trained):
    result, _, folder = trained
    reports = []
    again = Trainer(corpus(), LEXICON, CONFIG, folder, reports.append).run()
    assert reports == []
    assert (again.stage, result.stage) == ("sat", "sat")
    torch.testing.assert_close(again.model.gmm.means, result.model.gmm.means)
    torch.testing.assert_close(again.model.unadapted.means, result.model.unadapted.means)
    assert sorted(again.adaptations) == ["s0", "s1"]


def test_statistics_do_not_depend_on_the_division_into_shards(trained):
    result, _, _ = trained
    utterances = corpus()
    sums = []
    for frames in (100, 700, 10**9):
        shards = make_shards(utterances, frames)
        parts = [
            accumulate_shard(result.model, shard, result.aligned.alignments, result.adaptations) for shard in shards
        ]
        sums.append(sum(parts[-2::-1], parts[-1]))
    for stats in sums[1:]:
        torch.testing.assert_close(stats.gmm.sums, sums[0].gmm.sums, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(stats.transitions, sums[0].transitions)
    assert accumulate_shard(result.model, Shard(utterances), {}).gmm.num_frames == 0


def mistakes(hypotheses, utterances):
    """How many utterances are not recognized; TO and TWO may be the same."""
    heard = [" ".join(hypothesis.words).replace("TWO", "TO") for hypothesis in hypotheses]
    return sum(
        a != " ".join(utterance.words).replace("TWO", "TO") for a, utterance in zip(heard, utterances, strict=True)
    )


def decoder_of(model, folder):
    words = WordTable.of(LEXICON)
    (folder / "lm.arpa").write_text(arpa())
    lexicon = lexicon_fst(model.tree.phones, LEXICON, words)
    lg = compose_lexicon(lexicon, grammar(folder / "lm.arpa", words))
    graph = decoding_graph(lg, lexicon.symbols, model.tree, model.transitions)
    return GraphSearch(graph, words, DecodeOptions(beam=200.0, acoustic_scale=1.0))


@pytest.mark.parametrize("stage", ["mono", "lda"])
def test_trained_models_recognize_words(trained, tmp_path, stage):
    _, _, folder = trained
    model = load_checkpoint(folder / stage).model
    unseen = corpus(8, seed=5)
    hypotheses = decode_plain(model, decoder_of(model, tmp_path), [utterance.features for utterance in unseen])
    assert mistakes(hypotheses, unseen) <= 1


def test_adaptation_omits_quiet_frames_aligned_to_words(trained, tmp_path):
    model = trained[0].model
    heard = [utterance.features for utterance in corpus(16, seed=6, speakers=1)]
    hypotheses = decode_plain(model, decoder_of(model, tmp_path), heard)
    plain = speaker_transform(model, heard, hypotheses, minimum=100)
    noise = torch.full((60, heard[0].shape[1]), 4.0)
    padded = [torch.cat([frames, noise]) for frames in heard]
    words = [
        replace(
            hypothesis, pdfs=np.concatenate([hypothesis.pdfs, np.full(60, hypothesis.pdfs[len(hypothesis.pdfs) // 2])])
        )
        for hypothesis in hypotheses
    ]
    speech = [torch.arange(len(frames)) < len(frames) - 60 for frames in padded]

    def change(**options):
        return float((speaker_transform(model, padded, words, minimum=100, **options) - plain).norm())

    assert change(speech=speech) < 0.4 * change()


def test_adaptation_helps_an_unusual_speaker(trained, tmp_path):
    result, _, _ = trained
    model = result.model
    decoder = decoder_of(model, tmp_path)
    unusual = corpus(16, seed=6, speakers=1)
    heard = [utterance.features * 0.8 + 0.4 for utterance in unusual]
    first, *adapted = decode_speaker(model, decoder, heard, minimum=100)
    assert len(adapted) == 2
    transform = speaker_transform(model, heard, adapted[-1], minimum=100)

    def fit(matrix):
        rows = [model.gmm.log_likelihoods(model.chain(frames, matrix)) for frames in heard]
        pdfs = [torch.from_numpy(hypothesis.pdfs).long() for hypothesis in adapted[-1]]
        return sum(float(row.gather(1, pdf.unsqueeze(1)).sum()) for row, pdf in zip(rows, pdfs, strict=True))

    assert fit(transform) > fit(None)
    assert mistakes(adapted[-1], unusual) <= mistakes(first, unusual)


def test_checkpoint_survives_a_file_round_trip_and_damage_is_named(trained, tmp_path):
    result, _, _ = trained
    result.model.save(tmp_path / "model")
    again = HmmModel.load(tmp_path / "model")
    for part in PARTS:
        torch.testing.assert_close(getattr(again.gmm, part), getattr(result.model.gmm, part), rtol=0, atol=0)
    torch.testing.assert_close(again.chain.matrix, result.model.chain.matrix)
    save_checkpoint(tmp_path / "sat", result)
    saved = load_checkpoint(tmp_path / "sat")
    assert (saved.stage, saved.iteration, saved.finished) == (result.stage, result.iteration, result.finished)
    assert (saved.aligned.failures, saved.aligned.retried) == (result.aligned.failures, result.aligned.retried)
    assert saved.aligned.alignments.keys() == result.aligned.alignments.keys()
    for name, path in saved.aligned.alignments.items():
        for part in ("phones", "words", "starts", "states", "score"):
            np.testing.assert_array_equal(getattr(path, part), getattr(result.aligned.alignments[name], part))
    assert saved.adaptations.keys() == result.adaptations.keys()
    assert all(torch.equal(matrix, result.adaptations[who]) for who, matrix in saved.adaptations.items())
    (aligned,) = (tmp_path / "sat").glob("*/aligned")
    aligned.write_bytes(aligned.read_bytes()[:-1])
    with pytest.raises(ModelError, match="is damaged .*: delete the folder"):
        load_checkpoint(tmp_path / "sat")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="holds no acoustic model"):
        HmmModel.load(tmp_path / "model")


def test_training_without_utterances_is_refused():
    with pytest.raises(TrainingError, match="no utterances"):
        Trainer([], LEXICON)
    short = [InMemoryUtterance("u", "s", torch.zeros(3, 4), ("TO", "AT"))]
    with pytest.raises(
        TrainingError, match=r"none of the 1 utterances could be aligned \(first u: 3 frames are too few"
    ):
        Trainer(short, LEXICON, CONFIG).run("mono")
