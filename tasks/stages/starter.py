"""A first configuration for somebody's own recordings: looks at them, and writes YAML with the reasons as comments."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configurable.wording import counted
from devices.compute_threads import usable_cores
from recognition.initial_weights import SourceModel
from speech.models import PretrainedConfig
from storage.corpora import CorpusError, CorpusReader, RejectedEntry, Utterance
from tasks.config.data import DataConfig
from tasks.config.pipeline import worker_count
from tasks.config.yaml_text import one_line
from tasks.dataset.discovery import FoundSource
from tasks.dataset.manifest import Refused
from tasks.dataset.policies import DuplicatesConfig
from tasks.dataset.sources import LONGEST_NAME, SourceConfig
from tasks.figures import percent
from tasks.stages.prepare import Checked, check_all
from tasks.stages.sources import EXAMPLES, left_out, open_source

_SAMPLE = 200
"""Utterances whose audio is decoded to estimate durations, sample rates and the share of unusable ones."""
_FEW_SPEAKERS = 8
"""With fewer speakers than this, whole speakers cannot be spared for validation and test."""
_FEW_WORDS, _EXAMPLES = 100, 20
"""With at most this many different words and this many examples of each, words are the tokens."""
_LITTLE_H = 5.0
"""Hours of free speech to train on with fewer of which `starling init` warns: with as many, those of mini
LibriSpeech, a network from scratch gets every second word wrong even with a language model (RESULTS.md)."""
_LONGEST_S = 60.0
_ENGLISH = "en"
_MANY_REFUSED = 0.5
_STEPS, _MOST_EPOCHS = 800, 100
"""Steps that a model from scratch needs at least to recognize anything, and epochs that are given to them at most."""
_FEW_CORES = 4
"""With more, a training step hardly misses the core that is left for everything else."""
_BATCHES, _LEAST_BATCH_S = 15, 8
"""With little speech, an epoch has about this many batches, of at least so many seconds."""
_SIZES = (
    (2.0, "dim: 96, layers: 4, channels: 32, dropout: 0.15", 30, 0.002),
    (20.0, "dim: 144, layers: 6, channels: 32, dropout: 0.1", 60, 0.0015),
    (math.inf, "dim: 256, layers: 12, channels: 64, dropout: 0.1", 160, 0.001),
)
"""Hours of training data up to which a row holds; size of the model, seconds of a batch, and learning rate."""


_PRETRAINED_RATE = 16000
_READ_S = 30
"""Seconds of the longest utterance that Whisper reads."""


@dataclass(frozen=True)
class Survey:
    """What is known about the recordings; figures of the audio are of a sample."""

    language: str
    why_language: str
    """What says so; empty for the user."""
    utterances: int
    sets: dict[str, int]
    """Utterances by set; the empty name is for those without one."""
    speakers: int | None
    """Speakers with a name; None if no utterance names one."""
    words: int
    different_words: int
    hours: float
    sample_rates: dict[int, int]
    """Number of utterances of the sample by sample rate in Hz, the most frequent one first."""
    long_s: float
    """Duration that 99 % of the utterances do not exceed, in seconds."""
    sample: int
    """Number of utterances in the sample."""
    refused: dict[str, int]
    """Utterances of the sample that cannot be used, by reason."""
    refused_examples: dict[str, list[tuple[str, str]]]
    """Name and detail of the first of these utterances, by reason."""
    lost: int
    """Entries of the corpora that their readers could not use."""
    lost_reasons: dict[str, int] = field(default_factory=dict)
    """Number of these entries by reason."""
    lost_examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Name and detail of the first of these entries, by reason."""
    unnamed: int = 0
    """Utterances that name no speaker."""
    left_out: dict[str, Any] = field(default_factory=dict)
    """Tags that were removed from transcripts, and files that were passed over."""
    shared: int = 0
    """Speakers of the training set who are in another set, too."""

    @property
    def sample_rate(self) -> int:
        """The most frequent one, Hz."""
        return next(iter(self.sample_rates))

    @property
    def wide(self) -> bool:
        """Whether most of the recordings have frequencies above 4 kHz."""
        return 2 * sum(n for rate, n in self.sample_rates.items() if rate > 8000) > sum(self.sample_rates.values())

    @property
    def rates(self) -> str:
        """The sample rates, as text."""
        if len(self.sample_rates) == 1:
            return f"{self.sample_rate:,} Hz"
        total = sum(self.sample_rates.values())
        return ", ".join(f"{percent(count / total, 0)} at {rate:,} Hz" for rate, count in self.sample_rates.items())

    @property
    def who(self) -> str:
        """The number of speakers, as text."""
        if not self.speakers:
            return "speakers unknown"
        return f"{counted(self.speakers, 'speaker')}{' or more' if self.unnamed else ''}"

    @property
    def unusable(self) -> float:
        """Share of the entries that cannot be used, estimated from the sample."""
        share = sum(self.refused.values()) / self.sample
        return (share * self.utterances + self.lost) / (self.utterances + self.lost)

    @property
    def training_hours(self) -> float:
        """Hours of what is trained on, before a part of it is set aside for validation and test."""
        return self.hours * sum(n for name, n in self.sets.items() if name in ("", "train")) / self.utterances

    @property
    def few_words(self) -> bool:
        """Whether the words are few, and have enough examples each to be learned as they are."""
        return self.different_words <= _FEW_WORDS and self.words >= _EXAMPLES * self.different_words

    @property
    def too_little(self) -> str:
        """Why the recordings are too few to train on, and what to do; empty if they may do."""
        if not self.training_hours or self.few_words or self.training_hours >= _LITTLE_H:
            return ""
        return (
            f"this is probably too little to learn from: training on free speech takes {_LITTLE_H:g} hours or more, "
            f"and on commands of at most {_FEW_WORDS} different words {_EXAMPLES} examples of each. docs/"
            "own-recordings.md#how-much-it-needs has the reasons; `starling evaluate` scores an existing model on it"
        )

    def expected(self, pretrained: bool) -> str:
        """What the error rate will hold for; empty if nothing is trained.

        Args:
            pretrained: Whether training begins with a pretrained model.
        """
        if not self.training_hours:
            return ""
        if self.speakers is not None and self.speakers >= _FEW_SPEAKERS and not self.shared:
            return "an error rate for new voices: whole speakers are tested on"
        text = "an error rate for these voices; for new ones it is often several times as high"
        return text if pretrained else f"{text}. A pretrained model helps: --pretrained FOLDER (docs/pretrained.md)"


_LANGUAGES = (
    *("ar", "bg", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi", "fr", "he", "hi", "hr", "hu", "id"),
    *("it", "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "ta", "te", "th", "tr", "uk"),
    *("vi", "zh"),
)
"""Languages that are told apart: with all of py3langid's, lists of words are taken for Pidgin or Luxembourgish."""
_SURE = 0.9
_GUESSED_LETTERS = 100_000
"""Of transcripts whose language is guessed, what is looked at."""


def guess_language(texts: Iterable[str]) -> str:
    """The language of transcripts, by the n-grams of bytes of their different words (py3langid, Lui and Baldwin 2012).

    Returns:
        Its code; empty if it is not clear, as for letters, numbers or names.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # reads its model

    words = " ".join(dict.fromkeys(word for text in texts for word in text.lower().split()))[:_GUESSED_LETTERS]
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(_LANGUAGES)
    language, probability = identifier.classify(words)
    return str(language) if probability >= _SURE else ""


def begin_with(folder: Path) -> SourceModel:
    """The pretrained model in a folder.

    Raises:
        ValueError: It cannot be used.
    """
    from recognition.pretrained import read_pretrained_source  # imports torch

    source = read_pretrained_source(str(folder), Path())  # a local folder needs no cache
    source.model.check_packages()
    return source


def survey(sources: Sequence[FoundSource], language: str = "") -> Survey:
    """Read the sources, and decode a sample.

    Args:
        sources: The sources.
        language: Their language; empty for the one that all of them name, or else that of their transcripts.

    Raises:
        CorpusError: If there are fewer than three utterances, or most of the sample cannot be used.
    """
    utterances, readers = _read(sources, language or _ENGLISH)
    why = ""
    if not language:
        language, why = _language_of(utterances)
        utterances, readers = (utterances, readers) if language == _ENGLISH else _read(sources, language)
    problems = [problem for reader in readers for problem in reader.problems]
    if len(utterances) < 3:
        lost = f"; {len(problems)} more cannot be used, such as {_told(problems[0])}" if problems else ""
        raise CorpusError(
            f"{len(utterances)} utterance(s) with audio and text were found, and a training needs at least three{lost}"
        )
    step = max(1, len(utterances) // _SAMPLE)
    chosen = [utterance for _, utterance in utterances[::step]]
    data = data_config(language, _sources(sources, language))
    good, refused = list[Checked](), list[RejectedEntry]()
    for result in check_all(chosen, data, worker_count(0)):
        if isinstance(result, Refused):
            refused.append(RejectedEntry(result.id, result.reason, result.detail))
        else:
            good.append(result)
    if len(good) < (1 - _MANY_REFUSED) * len(chosen):
        reasons = ", ".join(f"{count} {reason}" for reason, count in _counts(refused).items())
        first = f"{refused[0].id}: {refused[0].detail}"
        raise CorpusError(f"{len(refused)} of {len(chosen)} utterances cannot be used: {reasons}; {first}")
    texts = Counter(word for _, utterance in utterances for word in utterance.text.lower().split())
    seconds = sorted(entry.duration for entry in good)
    return Survey(
        language=language,
        why_language=why,
        utterances=len(utterances),
        sets=dict(Counter(name for name, _ in utterances)),
        speakers=len({(utterance.corpus, utterance.speaker) for _, utterance in utterances if utterance.speaker})
        or None,
        unnamed=sum(not utterance.speaker for _, utterance in utterances),
        words=texts.total(),
        different_words=len(texts),
        hours=sum(seconds) / len(seconds) * len(utterances) / 3600,
        sample_rates=dict(Counter(entry.sample_rate for entry in good).most_common()),
        long_s=seconds[math.ceil(0.99 * len(seconds)) - 1],
        sample=len(chosen),
        refused=_counts(refused),
        refused_examples=_examples(refused),
        lost=len(problems),
        lost_reasons=_counts(problems),
        lost_examples=_examples(problems),
        left_out=left_out(readers),
        shared=_overlap(utterances),
    )


def data_config(language: str, sources: Sequence[SourceConfig]) -> DataConfig:
    """How a sample is checked: with the text rules of the language, and long utterances too."""
    normalizer = _normalizer(language) or {}
    duplicates = DuplicatesConfig(fingerprint=False)
    document = {"sources": tuple(sources), "normalizer": normalizer, "max_seconds": 3600.0, "duplicates": duplicates}
    return DataConfig.model_validate(document)


def _normalizer(language: str) -> dict[str, Any] | None:
    return None if language.partition("-")[0] == _ENGLISH else {"kind": "auto"}


def _sources(sources: Sequence[FoundSource], language: str) -> list[SourceConfig]:
    return [source.config(language) for source in sources]


def _language_of(utterances: Sequence[tuple[str, Utterance]]) -> tuple[str, str]:
    """The language that all utterances name, or else that of their transcripts, or else English; and why."""
    named = {utterance.language for _, utterance in utterances}
    if len(named) == 1 and named != {_ENGLISH}:
        return named.pop(), "as the corpus says"
    guess = guess_language(utterance.text for _, utterance in utterances)
    return (guess, "by the transcripts") if guess else (_ENGLISH, "since the transcripts do not tell")


def _overlap(utterances: Sequence[tuple[str, Utterance]]) -> int:
    """Number of speakers of the training set who are in another set, too."""
    sets: dict[str, set[tuple[str, str]]] = {}
    for name, utterance in utterances:
        if utterance.speaker:
            sets.setdefault(name, set()).add((utterance.corpus, utterance.speaker))
    others = set().union(*(who for name, who in sets.items() if name not in ("", "train")))
    return len(sets.get("train", set()) & others)


def _told(problem: RejectedEntry) -> str:
    return f"{problem.id} ({problem.reason}: {problem.detail})"


def _counts(problems: Sequence[RejectedEntry]) -> dict[str, int]:
    """Number of entries by reason, the most frequent one first."""
    return dict(Counter(problem.reason for problem in problems).most_common())


def _examples(problems: Sequence[RejectedEntry]) -> dict[str, list[tuple[str, str]]]:
    """Name and detail of the first entries of each reason."""
    examples: dict[str, list[tuple[str, str]]] = {}
    for problem in problems:
        named = examples.setdefault(problem.reason, [])
        if len(named) < EXAMPLES:
            named.append((problem.id, problem.detail))
    return examples


def _read(sources: Sequence[FoundSource], language: str) -> tuple[list[tuple[str, Utterance]], list[CorpusReader]]:
    """All utterances with their sets, and the readers, which know what could not be used."""
    utterances: list[tuple[str, Utterance]] = []
    readers: list[CorpusReader] = []
    for source, config in zip(sources, _sources(sources, language), strict=True):
        reader = open_source(config)
        utterances += [(source.set or utterance.split or "", utterance) for utterance in reader]
        readers.append(reader)
    return utterances, readers


class Starter:
    """Writes the configuration.

    Args:
        name: Name of the configuration and of the model.
        sources: The sources.
        surveyed: What is known about them.
        pretrained: The pretrained model that training begins with; None for random weights.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[FoundSource],
        surveyed: Survey,
        pretrained: SourceModel | None = None,
    ) -> None:
        self._name, self._sources, self._surveyed, self._language = name, sources, surveyed, surveyed.language
        self._pretrained = pretrained

    def text(self, folder: Path, file: str) -> str:
        """The configuration.

        Args:
            folder: The folder that it is written to: paths below it are relative.
            file: The file's name.
        """
        surveyed = self._surveyed
        lines = [
            f"# {counted(surveyed.utterances, 'utterance')}, {surveyed.hours:.2g} hours, {surveyed.who}, "
            f"{counted(surveyed.different_words, 'different word')}.",
            f"# Run it with: starling run {file}",
            f"name: {self._name}",
            "data:",
            *(f"  {line}" for line in self._data(folder)),
            *(self._model() if self._pretrained is None else self._tuned(self._pretrained)),
        ]
        return "\n".join(lines) + "\n"

    def _data(self, folder: Path) -> list[str]:
        surveyed, wide = self._surveyed, self._surveyed.wide
        rate = _PRETRAINED_RATE if wide or self._pretrained else 8000
        lines = [f"sample_rate: {rate}  # Hz; the recordings have {surveyed.rates}"]
        lines += ["min_seconds: 0.1  # commands are short"] if self._pretrained and surveyed.few_words else []
        if (normalizer := _normalizer(self._language)) is not None:
            lines.append(f"normalizer: {one_line(normalizer)}  # text rules of each source's language")
        if surveyed.long_s > _READ_S and self._pretrained is None:
            lines.append(
                f"max_seconds: {min(_LONGEST_S, math.ceil(surveyed.long_s)):g}  # longer utterances are left out"
            )
        lines += self._split()
        return [*lines, "sources:", *(f"  - {one_line(self._source(source, folder))}" for source in self._sources)]

    def _split(self) -> list[str]:
        """How the sets that are missing are made."""
        sets, speakers = self._surveyed.sets, self._surveyed.speakers
        shared = []
        if count := self._surveyed.shared:
            who = counted(count, "speaker")
            why = f"{who} of the training set are in other sets, too: the error rate is for these voices"
            shared = [f"speaker_overlap: allow  # {why}"]
        if "" not in sets and not self._divides_training:
            return shared
        what = "validation" if sets.keys() - {"", "train", "valid"} else "validation and test"
        if speakers is None:
            why = f"speakers are unknown, so none can be set aside for {what}; the error rate may be for these voices"
            return [f"split_by: utterance  # {why}"]
        if speakers >= _FEW_SPEAKERS:
            return [*shared, f"split_by: speaker  # {what} speakers are not trained on"]
        why = (
            f"{counted(speakers, 'speaker')}: too few to set some aside for {what}; the error rate is for these voices"
        )
        return [f"split_by: utterance  # {why}"]

    @property
    def _divides_training(self) -> bool:
        """Whether the validation set is taken out of the training set."""
        return "train" in self._surveyed.sets and "valid" not in self._surveyed.sets

    def _source(self, source: FoundSource, folder: Path) -> dict[str, Any]:
        path = source.path.resolve()
        below = path.is_relative_to(folder.resolve())
        document = source.document() | {"path": str(path.relative_to(folder.resolve()) if below else path)}
        document |= {} if self._language == _ENGLISH else {"language": self._language}
        # what is to be divided has no set
        named = source.set and not (self._divides_training and source.set == "train")
        return document | ({"set": source.set} if named else {})

    def _model(self) -> list[str]:
        surveyed = self._surveyed
        hours = surveyed.training_hours
        mels = 80 if surveyed.wide else 40
        words = f"{{kind: words}}  # each of the {surveyed.different_words} words is a token"
        pieces = "{kind: bpe, vocab_size: 500}" if hours >= 20 else "{kind: characters}"
        _, size, largest, rate = next(row for row in _SIZES if hours < row[0])
        batch, epochs = _schedule(hours, surveyed.long_s, largest)
        return [
            "# log-mel; neither the level of a recording nor pauses change the normalization: docs/features.md",
            f"features: {{num_mels: {mels}, level_db: -20, cmvn: global, cmvn_gate_db: 20, cmvn_floor: 4}}",
            f"tokens: {words if surveyed.few_words else pieces}",
            f"model: {{kind: conformer, {size}}}  # for {hours:.2g} hours of training data",
            "train:",
            f"  epochs: {epochs}",
            *(["  max_minutes: 60  # then the best model so far is taken; 0 trains all epochs"] if hours < 20 else []),
            f"  batch_seconds: {batch}  # of audio in a step",
            "  average: 5  # of the best epochs' weights",
            f"  optimizer: {{kind: adamw, lr: {rate}}}",
            "  schedule: {kind: cosine, warmup_epochs: 2}  # the learning rate rises for 2 epochs, then falls to 0",
            "  augment: {time_masks: 2, freq_masks: 2, pauses: {}}  # masked features, and pauses around the speech",
        ]

    def _tuned(self, pretrained: SourceModel) -> list[str]:
        """Trains a pretrained model on: Whisper with its decoder, all others by CTC."""
        assert pretrained.pretrained is not None
        assert isinstance(pretrained.model, PretrainedConfig)
        about, kind = pretrained.pretrained, pretrained.model.kind
        source = one_line(about.name)
        if kind != "whisper":
            normalize = str(bool(about.preprocessor.get("do_normalize", False))).lower()
            return [
                f"features: {{kind: waveform, normalize: {normalize}, cmvn: none}}  # as it was trained",
                *self._ctc_of(f"{{kind: {kind}, source: {source}}}", "freq_masks: 0, "),
            ]
        mels = pretrained.model.num_features
        bands = "" if mels == 80 else f", num_mels: {mels}"
        if not about.tokenizer:
            return [
                f"features: {{kind: whisper_logmel{bands}}}",
                *self._ctc_of(f"{{kind: whisper, source: {source}}}  # without tokenizer.json, without its decoder"),
            ]
        language = self._language.partition("-")[0]
        recognizer = f"{{kind: attention, ctc: false, decoder_network: {{kind: whisper, language: {language}}}}}"
        return (
            self._commands(source, bands, recognizer)
            if self._surveyed.few_words
            else self._sentences(source, bands, recognizer)
        )

    def _ctc_of(self, model: str, augment: str = "") -> list[str]:
        """An output layer for CTC on a pretrained encoder."""
        words = f"{{kind: words}}  # each of the {self._surveyed.different_words} words is a token"
        return [
            f"tokens: {words if self._surveyed.few_words else '{kind: characters}'}",
            f"model: {model}",
            "train:",
            "  epochs: 10",
            "  batch_seconds: 60  # of audio in a step",
            "  average: 3  # of the best epochs' weights",
            "  optimizer: {kind: adamw, lr: 0.0001}",
            "  new_lr: 20  # times as high for the output layer, which is new",
            "  schedule: {kind: cosine, warmup_epochs: 1}  # the learning rate rises for an epoch, then falls to 0",
            f"  augment: {{{augment}time_masks: 2, pauses: {{}}}}  # masked features, and pauses around the speech",
        ]

    @staticmethod
    def _commands(source: str, bands: str, recognizer: str) -> list[str]:
        """All of Whisper on a few words, with speech at other speeds and levels: configs/fsdd_whisper.yaml."""
        return [
            f"features: {{kind: whisper_logmel{bands}}}",
            f"model: {{kind: whisper, source: {source}}}",
            f"recognizer: {recognizer}",
            "train:",
            "  objective: {kind: attention, ctc_weight: 0, label_smoothing: 0.1}",
            "  epochs: 5",
            "  batch_seconds: 30  # of audio in a step",
            "  max_batch: 32",
            *_all_threads(),
            "  average: 2  # of the best epochs' weights",
            "  optimizer: {kind: adamw, lr: 2.0e-5}",
            "  schedule: {kind: cosine, warmup_epochs: 0.5}  # the learning rate rises, then falls to 0",
            "  augment:  # other speeds and levels, masked features, and pauses around the speech",
            "    {time_masks: 1, time_mask_frames: 8, freq_masks: 2, freq_mask_bins: 10, gain_db: 8,",
            "     speed_factors: [0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15], pauses: {edge_s: [0, 0.4], inner_s: [0, 0]}}",
            "decode: {kind: attention, beam: 1}",
        ]

    def _sentences(self, source: str, bands: str, recognizer: str) -> list[str]:
        """Whisper's decoder on free speech, written as it writes: configs/mini_librispeech_whisper.yaml."""
        hours = self._surveyed.training_hours
        return [
            f"features: {{kind: whisper_logmel{bands}, tail: true}}",
            f"model: {{kind: whisper, source: {source}, silence: all}}  # it hears 30 s, as when it was trained",
            f"recognizer: {recognizer}",
            "train:",
            "  objective: {kind: attention, ctc_weight: 0, label_smoothing: 0}",
            f"  epochs: {1 if hours >= 2 else 3}",
            "  batch_seconds: 480  # 16 utterances, each with its silence",
            "  max_batch: 16",
            *_all_threads(),
            "  optimizer: {kind: adamw, lr: 2.0e-5}",
            "  freeze: [{names: [encoder.*], until: 0}]  # only the decoder is trained",
            "  schedule: {kind: cosine, warmup_epochs: 0.1}  # the learning rate rises for a tenth of an epoch",
            "restore: {}  # transcripts get its capitals and punctuation; docs/pretrained.md",
            "decode: {kind: attention, beam: 5, length_power: 1}",
        ]


def _all_threads() -> list[str]:
    """Whisper computes for so long that loading is nothing; on few cores, the one that is left for it is missed."""
    cores = usable_cores()
    line = f"  threads: {cores}  # all cores of this machine: loading takes next to none"
    return [line] if cores <= _FEW_CORES else []


def _schedule(hours: float, long_s: float, batch: int) -> tuple[int, int]:
    """Seconds of a batch and number of epochs, so that little speech has enough steps, too.

    Args:
        hours: Hours of training data.
        long_s: Duration of a long utterance, in seconds.
        batch: Seconds of a batch for models of this size.
    """
    epochs = max(10, min(30, round(8 / max(hours, 0.01)))) if hours < 2 else 30
    batch = min(batch, max(_LEAST_BATCH_S, math.ceil(2 * long_s), round(3600 * hours / _BATCHES)))
    steps = max(1, round(3600 * hours / batch))  # of an epoch
    return batch, max(epochs, min(_MOST_EPOCHS, math.ceil(_STEPS / steps)))


def config_name(folder: Path) -> str:
    """A name for a configuration, from that of a folder or file."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().stem if folder.is_file() else folder.resolve().name)
    return name.strip("-._")[:LONGEST_NAME] or "recordings"
