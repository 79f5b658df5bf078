"""Every kind of language model keeps the contract of the room."""

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from speech.lm import (
    LANGUAGE_MODELS,
    WORDS,
    LmChoice,
    LmError,
    NgramConfig,
    Sources,
    arpa_of,
    estimate,
    estimated_words,
    load,
)
from speech.tokens import TokenConfig, train_tokenizer


class Holder(BaseModel):
    lm: LmChoice = NgramConfig()


OPTIONS = {
    "ngram": {"discount_fallback": (0.5, 1.0, 1.5)},
    "class": {"classes": 5},
    "hmm": {"classes": 3, "iterations": 4},
    "lstm": {"dim": 12, "dropout": 0.0},
}


MODEL_FILES = {"class": "classes.arpa", "hmm": "hmm.safetensors", "lstm": "lm.safetensors"}


def transcripts(sentences):
    return [" ".join(sentence).replace("w", "word ") for sentence in sentences]


@pytest.fixture(params=sorted(LANGUAGE_MODELS))
def cfg(request):
    options = OPTIONS.get(request.param, {})
    return Holder.model_validate({"lm": {"kind": request.param, **options}}).lm


@pytest.fixture
def lines():
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    chosen = np.random.default_rng(3)
    return [" ".join(digits[d] for d in chosen.geometric(0.3, size=chosen.integers(1, 7)) % 10) for _ in range(200)]


def test_estimate_writes_a_model_and_its_record(tmp_path, cfg, lines, in_place):
    (tmp_path / "more.txt").write_text("One, two, three!\n\xe9\n", encoding="latin-1")
    cfg = cfg.model_copy(update={"text": cfg.text.model_copy(update={"paths": (str(tmp_path / "more.txt"),)})})
    (tmp_path / "lm").mkdir()
    record = estimate(Sources(train=in_place, transcripts=lines, held_out={"valid": lines[:20]}), cfg, tmp_path / "lm")
    assert record["kind"] == cfg.kind
    assert record["text"]["kept"] == 201
    assert record["text"]["undecodable"] == 1
    files = {path.name: path.stat().st_size for path in (tmp_path / "lm").iterdir()}
    assert record["bytes"] == sum(files.values()) - files[WORDS], "no scratch stays"
    model = load(cfg, tmp_path / "lm")
    assert (tmp_path / "lm" / WORDS).read_text().split() == list(model.words)[3:]
    assert MODEL_FILES.get(cfg.kind, arpa_of(cfg) or WORDS) in files
    assert record["protection"] == {"allowed": False, "length": 8, "sequences": 0, "too_short": 0}
    perplexity = model.evaluate(line.split() for line in lines[:20])
    assert perplexity.without_unknown == pytest.approx(
        record["perplexity"]["valid"]["perplexity_without_unknown"], rel=1e-5
    )
    assert 2 < perplexity.without_unknown < 12


def test_transcripts_can_be_excluded(tmp_path, cfg, lines, in_place):
    (tmp_path / "more.txt").write_text("one two two\n" * 9 + "three one two three\n")
    text = cfg.text.model_copy(update={"paths": (str(tmp_path / "more.txt"),)})
    cfg = cfg.model_copy(update={"text": text, "transcripts": False})
    (tmp_path / "lm").mkdir()
    assert estimate(Sources(train=in_place, transcripts=lines), cfg, tmp_path / "lm")["text"]["kept"] == 10
    assert set(load(cfg, tmp_path / "lm").words) == {"<unk>", "<s>", "</s>", "one", "two", "three"}


def test_scores_one_by_one_equal_scores_in_batches_and_sum_to_one(tmp_path, cfg, lines, in_place):
    estimate(Sources(train=in_place, transcripts=lines), cfg, tmp_path)
    model = load(cfg, tmp_path)
    words = np.array([word for word in range(len(model.words)) if word != 1])
    state = model.start
    for word in ("one", "two", "unheard", "two", "one"):
        states, log_probs = model.score_batch([state] * len(words), words)
        assert (10**log_probs).sum() == pytest.approx(1, abs=1e-5)
        single = [model.score(state, int(word)) for word in words]
        np.testing.assert_allclose(log_probs, [log_prob for _, log_prob in single], atol=1e-6)
        assert list(states) == [after for after, _ in single]
        state, _ = model.score(state, model.words.index(word))
        assert isinstance(hash(state), int)


def test_the_same_text_gives_the_same_files(tmp_path, cfg, lines, in_place):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        estimate(Sources(train=in_place, transcripts=lines), cfg, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_missing_text_is_an_error_with_a_remedy(tmp_path, cfg, in_place):
    with pytest.raises(LmError, match=r"lm\.text\.paths"):
        estimate(Sources(train=in_place), cfg, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocabulary": 4},
        {"cutoffs": (2, 2, 2)},
        {"kind": "unigram", "vocabulary": 3},
        {"kind": "class", "classes": 3},
        {"kind": "hmm", "classes": 2, "iterations": 1},
        {"kind": "lstm", "dim": 4, "vocabulary": 5},
    ],
)
def test_vocabulary_is_known_before_estimation(tmp_path, lines, in_place, options):
    (tmp_path / "more.txt").write_text("one eleven one two three four five six seven eight\n" * 3)
    if options.get("kind", "ngram") == "ngram":
        options = options | {"smoothing": "witten-bell"}
    cfg = Holder.model_validate({"lm": options | {"text": [str(tmp_path / "more.txt")]}}).lm
    (tmp_path / "lm").mkdir()
    sources = Sources(transcripts=lines, protected=["one two three four five six seven eight"], train=in_place)
    estimate(sources, cfg, tmp_path / "lm")
    wanted = set((tmp_path / "lm" / WORDS).read_text().split())
    (tmp_path / "words").mkdir()
    assert set(estimated_words(sources, cfg, tmp_path / "words")) == wanted
    assert "eleven" not in wanted


def test_characters_can_be_units(tmp_path, lines):
    cfg = NgramConfig(order=4, unit="character", smoothing="witten-bell")
    record = estimate(Sources(transcripts=lines, held_out={"valid": ["one two"]}), cfg, tmp_path)
    model = load(cfg, tmp_path)
    assert "▁" in model.words
    assert len(model.words) < 30
    assert record["perplexity"]["valid"]["words"] == 7


def test_tokens_of_the_acoustic_model_can_be_units(tmp_path, lines):
    tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=40), lines)
    cfg = NgramConfig(order=3, unit="token", smoothing="witten-bell")
    sources = Sources(transcripts=[*lines, "wholly q"], tokenizer=tokenizer, held_out={"valid": lines[:5]})
    record = estimate(sources, cfg, tmp_path)
    assert set(load(cfg, tmp_path).words) <= {*tokenizer.symbols, "<unk>", "<s>", "</s>"}
    assert record["perplexity"]["valid"]["words"] == sum(len(tokenizer.encode(line)) for line in lines[:5])
    assert record["text"]["outside-alphabet"] == 1
    with pytest.raises(LmError, match="tokenizer"):
        estimate(Sources(transcripts=lines), cfg, tmp_path)


def test_text_may_be_a_list_of_paths():
    assert Holder.model_validate({"lm": {"text": ["a.txt", "s3://b/c.gz"]}}).lm.text.paths == ("a.txt", "s3://b/c.gz")
    assert Holder.model_validate({"lm": {"kind": "unigram", "text": "a.txt"}}).lm.text.paths == ("a.txt",)


@pytest.mark.parametrize(
    "options",
    [
        {"order": 0},
        {"cutoffs": (1, 0)},
        {"cutoffs": (-1, 0)},
        {"order": 2, "cutoffs": (0, 0, 1)},
        {"discount_fallback": (2.0, 1.0, 1.0)},
        {"discount_fallback": (0.0, 2.1, 1.0)},
        {"discount_fallback": (0.0, -0.1, 1.0)},
        {"prune": 1.0},
        {"kind": "unigram", "order": 2},
    ],
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValidationError):
        Holder.model_validate({"lm": options})


def test_possible_settings_are_kept_as_they_are():
    for options in (
        {"order": 12, "cutoffs": (0, 0, 1), "discount_fallback": (1.0, 2.0, 3.0)},
        {"order": 3, "cutoffs": (1, 1, 1), "discount_fallback": (0.0, 0.0, 0.0)},
        {"order": 1, "cutoffs": (), "discount_fallback": None, "smoothing": "witten-bell", "vocabulary": 1},
    ):
        kept = NgramConfig(**options).model_dump()
        assert kept == kept | options
    cfg = NgramConfig()
    assert (cfg.order, cfg.cutoffs, cfg.discount_fallback, cfg.vocabulary, cfg.prune) == (3, (), None, None, 0.0)
    assert not cfg.compress


def test_vocabulary_limit_and_pruning_reduce_model_size(tmp_path, lines):
    sizes = []
    for options in ({}, {"vocabulary": 5}, {"prune": 1e-3}):
        cfg = NgramConfig(discount_fallback=(0.5, 1.0, 1.5), **options)
        record = estimate(Sources(transcripts=lines), cfg, tmp_path)
        sizes.append((record["words"], sum(record["ngrams"])))
    assert sizes[1][0] == 5
    assert sizes[2][0] == sizes[0][0]
    assert max(sizes[1][1], sizes[2][1]) < sizes[0][1]


@pytest.mark.parametrize("value", [True, False])
def test_option_lmplz_is_refused_with_the_remedy(value):
    with pytest.raises(ValidationError, match="Starling estimates the same n-grams itself: remove it"):
        Holder.model_validate({"lm": {"kind": "ngram", "lmplz": value}})
