"""Language models: from text to probabilities of sentences.

    cfg = NgramConfig(order=3, text=["books/*.txt.bz2"])
    record = estimate(Sources(transcripts=train, protected=test, held_out={"valid": valid}), cfg, folder)
    model = load(cfg, folder)
    model.evaluate(line.split() for line in lines).without_unknown

A new kind of model is one file with its configuration beside `unigram.py`, and one line in `LANGUAGE_MODELS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from configurable.choices import OneOf
from configurable.files import replace_file
from speech.lm.arpa import read_arpa, write_arpa
from speech.lm.base import Estimator, LanguageModel, LmConfig, LmError, Perplexity, TextConfig, Unit
from speech.lm.classes import ClassConfig, ClassEstimator
from speech.lm.hidden_classes import HiddenClassConfig, HiddenClassEstimator
from speech.lm.interpolation import Mixture, merged_ngrams, tuned_weights
from speech.lm.kenlm import KenlmModel
from speech.lm.lstm import LstmConfig, LstmEstimator
from speech.lm.network import LmSpec, NetworkConfig, NetworkTrainer, NumberedText, read_network
from speech.lm.ngram import NgramModel
from speech.lm.ngram_estimator import NgramConfig, NgramEstimator
from speech.lm.pruning import entropy_pruned
from speech.lm.sources import Text, Units, text_digests, text_files
from speech.lm.unigram import UnigramConfig, UnigramEstimator
from speech.lm.vocabulary import END_ID, SPECIAL, START_ID, UNKNOWN_ID, Vocabulary
from speech.text import NormalizerConfig
from speech.tokens import TokenError, Tokenizer

__all__ = [
    "END_ID",
    "LANGUAGE_MODELS",
    "START_ID",
    "UNKNOWN_ID",
    "WORDS",
    "ClassConfig",
    "ClassEstimator",
    "Estimator",
    "HiddenClassConfig",
    "HiddenClassEstimator",
    "KenlmModel",
    "LanguageModel",
    "LmChoice",
    "LmConfig",
    "LmError",
    "LmOption",
    "LmSpec",
    "LstmConfig",
    "LstmEstimator",
    "Mixture",
    "NetworkConfig",
    "NetworkTrainer",
    "NgramConfig",
    "NgramEstimator",
    "NgramModel",
    "NumberedText",
    "Perplexity",
    "Sources",
    "Text",
    "TextConfig",
    "UnigramConfig",
    "UnigramEstimator",
    "Units",
    "Vocabulary",
    "arpa_of",
    "check_sources",
    "entropy_pruned",
    "estimate",
    "estimated_words",
    "kinds_with_arpa",
    "load",
    "merged_ngrams",
    "read_arpa",
    "read_network",
    "text_digests",
    "tuned_weights",
    "unit_of",
    "write_arpa",
]

LANGUAGE_MODELS: dict[str, type[LmConfig]] = {
    "ngram": NgramConfig,
    "unigram": UnigramConfig,
    "class": ClassConfig,
    "hmm": HiddenClassConfig,
    "lstm": LstmConfig,
}
LmChoice = Annotated[LmConfig, OneOf(LANGUAGE_MODELS, "ngram")]
"""A field that takes the configuration of any language model."""
LmOption = Annotated[LmConfig | None, OneOf(LANGUAGE_MODELS, "ngram", optional=True)]
"""The same, or None for no language model."""
WORDS = "words.txt"
"""File with what a model predicts, one a line, without the special symbols."""


@dataclass(frozen=True)
class Sources:
    """What a language model is made from, besides the text that its configuration names; all normalized already."""

    transcripts: Iterable[str] = ()
    """Training transcripts."""
    protected: Iterable[str] = ()
    """Transcripts of the test and validation sets: text with their word sequences is left out."""
    held_out: Mapping[str, Iterable[str]] = field(default_factory=dict)
    """Transcripts by name of their set, on which the record gives perplexities."""
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    """How the text is normalized: as the transcripts were."""
    language: str = ""
    """BCP 47 tag of the text's language, on which the normalization may depend."""
    tokenizer: Tokenizer | None = None
    """That of the acoustic model, for models of its tokens."""
    train: NetworkTrainer | None = None
    """Trains networks, for models that are networks."""


def estimate(sources: Sources, cfg: LmConfig, folder: Path, workers: int = 1) -> dict[str, Any]:
    """Estimates a language model and writes it to a folder.

    Args:
        sources: Transcripts.
        cfg: Kind of the model, its settings, and its text.
        folder: Where the model's files go: an empty folder.
        workers: Number of processes.

    Returns:
        The record, a JSON value: `kind`, `text` (lines by what became of them), `protection`, `words` (without special
        symbols), `bytes` (of the model's files), other sizes, and `perplexity` by set.

    Raises:
        LmError: There is no text, or the model cannot be estimated from it.
    """
    estimator = cfg.build(sources.train)
    cut = Units(estimator.unit, sources.tokenizer)
    transcripts = sources.transcripts if cfg.transcripts else ()
    text = Text(cfg.text, sources.normalizer, transcripts, sources.protected, cut, workers, sources.language)
    model, facts = estimator.estimate(text, folder, workers)
    words = [word for word in model.words if word not in SPECIAL]
    replace_file(folder / WORDS, "".join(f"{word}\n" for word in words).encode())
    perplexity = {name: model.evaluate(_writable(cut, lines)).to_dict() for name, lines in sources.held_out.items()}
    about = {"words": len(words), "protection": text.protection_record(), "perplexity": perplexity}
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != WORDS)
    return {"kind": cfg.kind, "bytes": size, **facts, **about}


def estimated_words(sources: Sources, cfg: LmConfig, folder: Path, workers: int = 1) -> list[str]:
    """The words that `estimate` gives a model of words, without the special symbols; takes a fraction of its time.

    Raises:
        LmError: There is no text.
    """
    words = NgramConfig(
        order=1,
        smoothing="witten-bell",
        text=cfg.text,
        transcripts=cfg.transcripts,
        vocabulary=getattr(cfg, "vocabulary", None),
        cutoffs=getattr(cfg, "cutoffs", ())[:1],
    )
    estimate(replace(sources, held_out={}), words, folder, workers)
    return (folder / WORDS).read_text(encoding="utf-8").splitlines()


def _writable(cut: Units, lines: Iterable[str]) -> Iterator[list[str]]:
    """Yields the units of each line, without lines that the tokens cannot write."""
    for line in lines:
        try:
            yield cut(line)
        except TokenError:
            continue


def load(cfg: LmConfig, folder: Path) -> LanguageModel:
    """Reads the model that `estimate` wrote to a folder with the same configuration."""
    return cfg.build().load(folder)


def check_sources(cfg: LmConfig) -> None:
    """Check, without reading the text, that a model can be estimated: its text files are there.

    Raises:
        LmError: One is missing.
    """
    text_files(cfg.text)


def arpa_of(cfg: LmConfig) -> str:
    """Name of the ARPA file that `estimate` writes; empty for kinds that decoders cannot read."""
    return cfg.build().arpa


def kinds_with_arpa() -> list[str]:
    """Kinds whose models decoders can read."""
    return [kind for kind, config in LANGUAGE_MODELS.items() if arpa_of(config.model_validate({}))]


def unit_of(cfg: LmConfig) -> Unit:
    """What a model with this configuration predicts."""
    return cfg.build().unit
