"""Decoder kind `graph`: exact on a small graph, from its files, through a bundle."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hmm_toys import LEXICON, arpa, best_sentence, context_tree, random_model, sentence_costs
from support import tiny_bundle

from recognition.bundle import BundleError, BundleSpec, TiedStates, add_decoder, load_spec, own_decoder, save_bundle
from recognition.frame_stream import EndpointConfig, FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from recognition.transcriber import Transcriber
from speech.decoding import DecodeError, GraphConfig, GreedyConfig, build_decoder
from speech.features import LogMelConfig
from speech.hmm.decode import noise_pdfs
from speech.hmm.priors import StateOutputs, log_priors, scaled_likelihoods
from speech.models import TdnnConfig
from speech.tokens import CharacterTokenizer
from speech.vad import EverythingConfig
from speech.words import FrameTimes, timed_words

TOKENIZER = CharacterTokenizer(["<blank>", "▁", "A"])


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model, the folder of its files, and the configuration of an exact search with them."""
    folder = tmp_path_factory.mktemp("graph")
    rng = np.random.default_rng(3)
    model = random_model(rng, context_tree(rng))
    model.save(folder / "hmm")
    lines = [f"{word} {' '.join(phones)}\n" for word, several in LEXICON.items() for phones in several]
    (folder / "lexicon.txt").write_text("".join(lines))
    (folder / "lm.arpa").write_text(arpa())
    cfg = GraphConfig(
        hmm=str(folder / "hmm" / "model.json"),
        lexicon=str(folder / "lexicon.txt"),
        lm=str(folder / "lm.arpa"),
        beam=1000.0,
        acoustic_scale=0.7,
    )
    return model, folder, cfg


def random_posteriors(model, seed, frames=9):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, frames, model.gmm.num_pdfs)) * 2)
    return scores.float().log_softmax(-1)


def random_priors(model, seed=8):
    return log_priors(np.random.default_rng(seed).integers(1, 50, model.gmm.num_pdfs))


def test_priors_are_shares_of_frames_and_add_up_to_one():
    priors = log_priors([6, 0, 3])
    assert [math.exp(log_prior) for log_prior in priors] == pytest.approx([0.6, 0.1, 0.3])
    assert sum(math.exp(log_prior) for log_prior in log_priors(range(1000))) == pytest.approx(1.0)


def test_likelihoods_are_posteriors_minus_priors_at_the_graphs_rate():
    posteriors = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], dtype=np.float32))
    likelihoods = scaled_likelihoods(posteriors, log_priors([3, 1]), 3)
    assert np.exp(likelihoods[::3]) == pytest.approx(np.array([[0.5 / 0.75, 2.0], [1.2, 0.4]]), rel=1e-5)
    assert np.array_equal(likelihoods, np.repeat(likelihoods[::3], 3, axis=0))
    assert likelihoods.dtype == np.float32


@pytest.mark.parametrize(("factor", "seed"), [(1, 1), (1, 2), (2, 3), (3, 4)])
def test_decoder_finds_the_best_of_all_sentences(toy, factor, seed):
    model, _, cfg = toy
    priors = random_priors(model)
    log_probs = random_posteriors(model, seed, 12 // factor)
    hypotheses = build_decoder(cfg, TOKENIZER, StateOutputs(priors, factor)).decode(
        log_probs, torch.tensor([12 // factor])
    )
    likelihoods = scaled_likelihoods(log_probs[0].numpy(), priors, factor)
    cost, words = best_sentence(model, cfg.acoustic_scale * likelihoods)
    assert -hypotheses[0].score == pytest.approx(cost, abs=2e-2)  # determinization rounds weights to 1/1024
    assert tuple(hypotheses[0].text.split()) == words or -hypotheses[0].score <= cost
    without = scaled_likelihoods(log_probs[0].numpy(), [0.0] * len(priors), factor)
    assert best_sentence(model, cfg.acoustic_scale * without)[0] != pytest.approx(cost, abs=0.1)


def test_hypothesis_has_word_times_and_a_confidence(toy):
    model, _, cfg = toy
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs(random_priors(model), 2))
    hypothesis = next(
        said
        for seed in range(30)
        if len((said := decoder.decode(random_posteriors(model, seed, 20), torch.tensor([20]))[0]).text.split()) > 1
    )
    assert len(hypothesis.word_frames) == len(hypothesis.text.split())
    assert 0 < hypothesis.confidence < 1
    words = timed_words(hypothesis, torch.zeros(20, 1), TOKENIZER, FrameTimes(0.02, offset=1.0))
    assert " ".join(word.word for word in words) == hypothesis.text
    starts = [word.start for word in words]
    assert starts == sorted(starts)
    assert starts[0] >= 1.0
    assert words[-1].start + words[-1].duration == pytest.approx(1.0 + 20 * 0.02)


def test_utterances_of_a_batch_end_at_their_lengths(toy):
    model, _, cfg = toy
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs(random_priors(model)))
    long, short = random_posteriors(model, 1, 12), random_posteriors(model, 2, 8)
    batch = torch.cat([long, torch.nn.functional.pad(short, (0, 0, 0, 4))])
    together = decoder.decode(batch, torch.tensor([12, 8]))
    assert together[0] == decoder.decode(long, torch.tensor([12]))[0]
    assert together[1] == decoder.decode(short, torch.tensor([8]))[0]
    assert decoder.decode(batch, torch.tensor([0, 0]))[0].text == ""


def test_decoder_and_model_must_have_the_same_units(toy, tmp_path):
    model, _, cfg = toy
    saved_bundle(tmp_path / "states", model)
    with pytest.raises(DecodeError, match="greedy does not search what .* of kind hybrid puts out: use graph"):
        Recognizer.load(tmp_path / "states", GreedyConfig()).prepare()
    tiny_bundle(tmp_path / "tokens")
    with pytest.raises(DecodeError, match="graph does not search what .* of kind ctc puts out: use greedy or"):
        Recognizer.load(tmp_path / "tokens", cfg).prepare()


def test_graph_of_a_larger_model_is_refused(toy):
    _, _, cfg = toy
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs(log_priors([1, 1, 1])))
    with pytest.raises(DecodeError, match=r"decode\.graph has \d+ states, the model 3"):
        decoder.prepare()


def test_language_model_of_other_words_is_refused(toy, tmp_path):
    _, _, cfg = toy
    other = arpa().replace("\tA", "\tX").replace("\tT", "\tY")
    (tmp_path / "lm.arpa").write_text(other)
    with pytest.raises(DecodeError, match="no word of .*lm.arpa has a pronunciation"):
        cfg.model_copy(update={"lm": str(tmp_path / "lm.arpa")}).prepared(tmp_path)


@pytest.mark.parametrize("wrong", [{"graph": "g"}, {"hmm": "h", "lm": "l"}, {"graph": "g", "words": "w", "lm": "l"}])
def test_configuration_requires_options_that_belong_together(wrong):
    with pytest.raises(ValueError, match="together|is given, so nothing is made from lm"):
        GraphConfig.model_validate(wrong)


def test_graph_without_its_sources_is_refused(toy, tmp_path):
    _, _, cfg = toy
    with pytest.raises(DecodeError, match="lacks hmm, lexicon, lm: name files in decode"):
        GraphConfig().prepared(tmp_path)
    with pytest.raises(DecodeError, match="lacks lm: "):
        cfg.model_copy(update={"lm": ""}).prepared(tmp_path)


def test_other_parameters_search_the_same_graph(toy, monkeypatch):
    model, _, cfg = toy
    priors = StateOutputs(random_priors(model), 1)
    decoder, posteriors = build_decoder(cfg, TOKENIZER, priors), random_posteriors(model, 4, 12)
    decoder.prepare()
    monkeypatch.setattr("speech.decoding.graph.open_search", None)
    other = decoder.with_config(cfg.model_copy(update={"acoustic_scale": 0.2}))
    hypothesis = other.decode(posteriors, torch.tensor([12]))[0]
    monkeypatch.undo()
    fresh = build_decoder(cfg.model_copy(update={"acoustic_scale": 0.2}), TOKENIZER, priors)
    assert hypothesis == fresh.decode(posteriors, torch.tensor([12]))[0]
    assert hypothesis.score != pytest.approx(decoder.decode(posteriors, torch.tensor([12]))[0].score)


def test_another_probability_of_silence_makes_another_graph(toy):
    model, _, cfg = toy
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs(random_priors(model), 1))
    decoder.prepare()
    other = decoder.with_config(cfg.model_copy(update={"silence_probability": 0.9}))
    assert other.search is not decoder.search
    (quiet,), (loud,) = (
        with_silence.decode(random_posteriors(model, 4, 12), torch.tensor([12])) for with_silence in (decoder, other)
    )
    assert quiet.score != pytest.approx(loud.score)
    finished = cfg.model_copy(update={"graph": "HCLG.fst", "words": "words.txt"})
    assert finished.same_graph(finished.model_copy(update={"silence_probability": 0.9}))


@pytest.mark.parametrize("changes", [{}, {"nbest": 3}, {"word_score": 0.5}])
@pytest.mark.parametrize("factor", [1, 2])
def test_search_that_goes_on_finds_what_the_search_of_all_frames_finds(toy, factor, changes):
    model, _, cfg = toy
    states = StateOutputs(random_priors(model), factor)
    decoder, log_probs = (
        build_decoder(cfg.model_copy(update=changes), TOKENIZER, states),
        random_posteriors(model, 5, 24),
    )
    (expected,) = decoder.decode(log_probs, torch.tensor([24]))
    assert expected.text
    for size in (1, 7, 24):
        stream, other = decoder.stream(), decoder.stream()
        for start in range(0, 24, size):
            stream.accept(log_probs[0, start : start + size].numpy())
            other.accept(log_probs[0, :size].numpy())
            assert len(stream.best().word_frames) == len(stream.best().text.split())
        assert stream.finish() == expected
    empty = decoder.stream()
    assert empty.best().text == empty.finish().text == ""


def test_states_of_silence_are_those_of_sentences_without_words(toy):
    model, _, cfg = toy
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs(random_priors(model), 1))
    assert decoder.silence
    assert decoder.silence <= set(noise_pdfs(model).tolist())
    log_probs = torch.full((1, 9, model.gmm.num_pdfs), -20.0)
    log_probs[..., sorted(decoder.silence)] = -1.0
    assert decoder.decode(log_probs, torch.tensor([9]))[0].text == ""


def test_hybrid_recognizes_in_a_stream_what_it_recognizes_in_the_whole(toy, tmp_path):
    model, _, cfg = toy
    saved_bundle(tmp_path, model, LogMelConfig(num_mels=8, cmvn="none"), scale=8.0)
    add_decoder(tmp_path, cfg)
    recognizer = Recognizer.load(tmp_path)
    wave = torch.randn(8000, generator=torch.Generator().manual_seed(1)) / 10
    encoded = recognizer.encode(wave[None], torch.tensor([8000]))
    (expected,) = recognizer.search(encoded)
    assert expected.text
    times = recognizer.times(encoded, 0, 0.0, 1.0)
    for size in (300, 8000):
        endpoint = EndpointConfig(after_speech_s=0, at_start_s=0, longest_s=3600)
        stream = FrameStream(recognizer, FrameStreamConfig(chunk_ms=80, endpoint=endpoint))
        partial = [
            result for start in range(0, 8000, size) for result in stream.accept(wave[start : start + size].numpy())
        ]
        assert not any(result.final for result in partial)
        (final,) = stream.finish()
        assert final.text == expected.text
        assert final.words == pytest.approx(tuple(recognizer.timed_words(encoded, 0, expected, times)))
    assert partial


def test_states_of_silence_end_a_segment(toy, tmp_path):
    model, _, cfg = toy
    saved_bundle(tmp_path, model, LogMelConfig(num_mels=8, cmvn="none"))
    add_decoder(tmp_path, cfg)
    recognizer = Recognizer.load(tmp_path)
    stream = FrameStream(recognizer, FrameStreamConfig(endpoint=EndpointConfig(after_speech_s=0.2)))
    silence = sorted(recognizer.decoder.silence)
    loud = next(state for state in range(model.gmm.num_pdfs) if state not in silence)
    log_probs = torch.full((40, model.gmm.num_pdfs), -9.0)
    log_probs[torch.arange(40), torch.tensor([loud] * 12 + [silence[0]] * 28)] = -0.1
    finals = [result for result in stream._searched(log_probs) if result.final]
    assert [(result.start_s, result.end_s) for result in finals] == [(0.0, 22 * 0.02)]


def saved_bundle(folder: Path, model, features=None, scale=1.0) -> BundleSpec:
    torch.manual_seed(1)
    states = TiedStates(model="ab" * 32, frame_shift_ms=10.0, log_priors=random_priors(model))
    spec = BundleSpec(
        sample_rate=8000,
        features=features or LogMelConfig(num_mels=8, cmvn="utterance"),
        stats=None,
        tokenizer=TOKENIZER.to_dict(),
        model=TdnnConfig(dim=16, layers=2, bottleneck=4, prefinal=8, subsampling=2, channels=2),
        states=states,
    )
    network = spec.build_model()
    network.output.weight.data.mul_(scale)
    save_bundle(folder, spec, dict(network.state_dict()))
    return spec


def test_bundle_includes_the_graph_without_its_sources(toy, tmp_path):
    model, _, cfg = toy
    spec = saved_bundle(tmp_path / "bundle", model)
    assert spec.num_outputs == model.gmm.num_pdfs
    add_decoder(tmp_path / "bundle", cfg)
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert names == {"bundle.json", "model.safetensors", "graph.fst", "graph-words.txt"}
    kept = load_spec(tmp_path / "bundle")
    assert (kept.decode.graph, kept.decode.words, kept.decode.hmm) == ("graph.fst", "graph-words.txt", "")
    assert kept.states == spec.states

    (tmp_path / "bundle").rename(tmp_path / "elsewhere")
    recognizer = Recognizer.load(tmp_path / "elsewhere")
    waves = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    scores = recognizer.encode(waves, torch.tensor([4000, 3000]))
    assert scores.log_probs.shape[2] == model.gmm.num_pdfs
    hypotheses = recognizer.search(scores)
    likelihoods = scaled_likelihoods(
        scores.log_probs[0, : int(scores.frames[0])].numpy(), spec.states.log_priors, spec.frame_factor
    )
    direct = build_decoder(own_decoder(tmp_path / "elsewhere"), TOKENIZER, StateOutputs(spec.states.log_priors, 2))
    assert direct.decode(*scores[:2]) == hypotheses
    assert len(likelihoods) == 2 * int(scores.frames[0])

    whole = Transcriber(tmp_path / "elsewhere", vad=EverythingConfig())
    said = whole.transcribe([waves[0].numpy()], sample_rate=8000, words=True)[0]
    assert said.text == " ".join(word.word for word in said.words)
    assert (said.confidence > 0) == bool(said.text)

    (tmp_path / "elsewhere" / "graph.fst").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"graph\.fst is damaged"):
        Recognizer.load(tmp_path / "elsewhere")


SECOND = """\\data\\
ngram 1=6
ngram 2=3

\\1-grams:
-99\t<s>\t-0.4
-0.9\tA\t-0.2
-0.4\tAT\t-0.3
-0.8\tTO\t-0.1
-0.6\tTWO\t-0.5
-0.5\t</s>

\\2-grams:
-0.1\t<s> TWO
-0.2\tTWO AT
-0.15\tAT </s>

\\end\\
"""


def several(cfg, model, log_probs, **changes):
    decoder = build_decoder(cfg.model_copy(update=changes), TOKENIZER, StateOutputs(random_priors(model), 2))
    (hypothesis,) = decoder.decode(log_probs, torch.tensor([log_probs.shape[1]]))
    return hypothesis


@pytest.fixture(scope="module")
def second(toy):
    """A configuration like the toy's with another language model."""
    _, folder, cfg = toy
    (folder / "second.arpa").write_text(SECOND)
    return cfg.model_copy(update={"lm": str(folder / "second.arpa")})


@pytest.mark.parametrize("seed", range(4))
def test_several_hypotheses_are_the_best_sentences(toy, seed):
    model, _, cfg = toy
    log_probs = random_posteriors(model, seed, 5)  # ten frames, for three words at most
    best = several(cfg, model, log_probs, nbest=20, lattice_beam=1000.0)
    costs = sentence_costs(
        model, cfg.acoustic_scale * scaled_likelihoods(log_probs[0].numpy(), random_priors(model), 2)
    )
    assert len(best.nbest) == len(costs) > 10
    assert {tuple(other.text.split()) for other in best.nbest} == set(costs)
    assert [-other.score for other in best.nbest] == pytest.approx(sorted(costs.values()), abs=3e-2)
    everything = np.logaddexp.reduce([-cost for cost in costs.values()])
    for other in best.nbest:
        assert -other.score == pytest.approx(costs[tuple(other.text.split())], abs=3e-2)  # determinization rounds
        assert other.posterior == pytest.approx(math.exp(other.score - everything), rel=0.1, abs=1e-3)
        assert len(other.word_frames) == len(other.word_confidences) == len(other.text.split())
        assert all(0 <= begin < end <= 5 for begin, end in other.word_frames)
        assert other.word_frames == sorted(other.word_frames)
    assert (best.text, best.score) == (best.nbest[0].text, best.nbest[0].score)
    assert best.word_frames == best.nbest[0].word_frames


def test_best_hypothesis_has_the_same_score_alone_and_in_nbest(toy):
    model, _, cfg = toy
    for seed in range(5):
        log_probs = random_posteriors(model, seed, 10)
        alone, first = several(cfg, model, log_probs), several(cfg, model, log_probs, nbest=2)
        assert first.score == pytest.approx(alone.score, abs=1e-3)
        assert (alone.nbest, len(first.nbest)) == ([], 2)
        if first.text == alone.text:
            assert len(first.word_confidences) == len(first.text.split())
        narrow = several(cfg, model, log_probs, nbest=2, lattice_beam=1e-6)
        assert [other.text for other in narrow.nbest] == [first.text]
        assert narrow.nbest[0].posterior == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_rescoring_equals_decoding_with_the_second_models_graph(toy, second, seed):
    model, _, cfg = toy
    log_probs = random_posteriors(model, seed, 7)
    wanted = several(second, model, log_probs, nbest=20, lattice_beam=1000.0)
    rescored = several(cfg, model, log_probs, nbest=20, lattice_beam=1000.0, rescore_lm=second.lm, rescore_nbest=5000)
    assert [other.score for other in rescored.nbest] == pytest.approx([other.score for other in wanted.nbest], abs=5e-2)
    scores = {other.text: other.score for other in wanted.nbest}
    for other in rescored.nbest[:10]:
        assert other.score == pytest.approx(scores[other.text], abs=5e-2)
    plain = several(cfg, model, log_probs, nbest=20, lattice_beam=1000.0)
    assert [other.text for other in plain.nbest] != [other.text for other in rescored.nbest]
    same = several(cfg, model, log_probs, nbest=20, lattice_beam=1000.0, rescore_lm=second.lm, rescore_weight=0.0)
    assert same == plain


def test_word_score_changes_the_ranking_of_hypotheses(toy, second):
    model, _, cfg = toy
    log_probs = random_posteriors(model, 2, 10)
    wide = {"lattice_beam": 1000.0, "rescore_nbest": 30}
    for lm in ("", second.lm):
        plain = several(cfg, model, log_probs, nbest=30, rescore_lm=lm, **wide).nbest
        for word_score in (-3.0, 3.0):
            ranked = several(cfg, model, log_probs, nbest=30, word_score=word_score, rescore_lm=lm, **wide)
            wanted = {other.text: other.score + word_score * len(other.text.split()) for other in plain}
            assert {other.text: other.score for other in ranked.nbest} == pytest.approx(wanted)
            assert [other.text for other in ranked.nbest] == sorted(wanted, key=lambda text: -wanted[text])
            assert [other.text for other in ranked.nbest] != [other.text for other in plain]
            alone = several(cfg, model, log_probs, word_score=word_score, rescore_lm=lm, **wide)
            assert (alone.text, alone.score, alone.nbest) == (ranked.text, ranked.score, [])
    first = several(cfg, model, log_probs, word_score=9.0, lattice_beam=1000.0, rescore_nbest=1)
    assert first.text == several(cfg, model, log_probs, nbest=2, lattice_beam=1000.0).text


def test_nbest_of_silence_and_of_an_empty_utterance(toy):
    model, _, cfg = toy
    log_probs = random_posteriors(model, 1, 4)
    decoder = build_decoder(cfg.model_copy(update={"nbest": 3}), TOKENIZER, StateOutputs(random_priors(model)))
    empty, full = decoder.decode(log_probs.repeat(2, 1, 1), torch.tensor([0, 4]))
    assert (empty.text, empty.nbest) == ("", [])
    assert 0 < full.confidence <= 1


def test_second_model_needs_the_first(toy, second, tmp_path):
    _, _, cfg = toy
    with pytest.raises(ValueError, match="takes the graph's language model out of the scores: name it in graph_lm"):
        GraphConfig(graph="g", words="w", rescore_lm="l")
    with pytest.raises(ValueError, match="without graph, name it in lm"):
        GraphConfig(hmm="h", lexicon="l", graph_lm="l")
    named = cfg.model_copy(update={"rescore_lm": second.lm})
    assert named.prepared(tmp_path).graph_lm == cfg.lm
    assert cfg.prepared(tmp_path).graph_lm == ""
    files = {"graph": "g", "words": "w", "graph_lm": "stage.arpa"}
    assert named.completed(files).graph_lm == "stage.arpa"
    assert named.completed({"graph": "g", "words": "w"}).graph_lm == cfg.lm
    assert GraphConfig.model_validate(named.completed(files).model_dump()) == named.completed(files)


def test_bundle_includes_both_language_models(toy, second, tmp_path):
    model, _, cfg = toy
    saved_bundle(tmp_path / "bundle", model)
    add_decoder(tmp_path / "bundle", cfg.model_copy(update={"rescore_lm": second.lm, "rescore_weight": 0.6}))
    files = {"graph.fst", "graph-words.txt", "graph-lm.arpa", "rescore-lm.arpa"}
    assert {path.name for path in (tmp_path / "bundle").iterdir()} == files | {"bundle.json", "model.safetensors"}
    log_probs = random_posteriors(model, 5, 10)
    own = several(own_decoder(tmp_path / "bundle"), model, log_probs, nbest=4)
    assert own == several(cfg, model, log_probs, nbest=4, rescore_lm=second.lm, rescore_weight=0.6)
    waves = np.random.default_rng(1).normal(size=4000).astype(np.float32) / 10
    (said,) = Transcriber(tmp_path / "bundle", nbest=3).transcribe([waves], sample_rate=8000, words=True)
    if said.nbest:
        assert said.nbest[0].text == said.text
        assert [word.word for word in said.nbest[0].words] == said.text.split()


def test_other_weights_share_the_graph_and_the_models(toy, second):
    model, _, cfg = toy
    both = cfg.model_copy(update={"rescore_lm": second.lm})
    decoder = build_decoder(both, TOKENIZER, StateOutputs(random_priors(model), 2))
    decoder.prepare()
    other = decoder.with_config(both.model_copy(update={"rescore_weight": 0.2, "acoustic_scale": 0.3}))
    assert other._rescorer is decoder._rescorer
    assert other._search._graph is decoder._search._graph
    log_probs = random_posteriors(model, 3, 10)
    fresh = several(both, model, log_probs, rescore_weight=0.2, acoustic_scale=0.3)
    assert other.decode(log_probs, torch.tensor([10])) == [fresh]
