"""Configuration of a corpus: its location, its layout, and which utterances are used."""

import json
import re
from typing import Any
from unicodedata import normalize

from pydantic import Field, field_validator, model_validator

from configurable.configuration import Configuration
from configurable.wording import nearest, printable
from speech.synthesis.corpus import SynthesisConfig
from storage.corpora import READERS, reader_class
from storage.corpora.base import corpus_name

LONGEST_NAME = 100
"""Characters of a name: it is part of the names of files, of which few file systems allow more than 255."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def layouts() -> dict[str, str]:
    """What a corpus of each kind looks like on disk, file names in backticks."""
    synthetic = "spoken commands, synthesized by eSpeak NG; needs no files"
    return {kind: reader_class(kind).LAYOUT for kind in sorted(READERS)} | {"synthetic": synthetic}


def is_name(text: str) -> bool:
    """Whether a text is a valid name of a model, a set, an object and a metric."""
    return len(text) <= LONGEST_NAME and bool(_NAME.fullmatch(text))


def checked_name(name: str) -> str:
    """Return a valid or empty name unchanged.

    Raises:
        ValueError: If the name is invalid.
    """
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{printable(name, LONGEST_NAME)!r} has {len(name):,} characters: use at most {LONGEST_NAME}")
    if name and not is_name(name):
        raise ValueError(f"{name!r}: use letters, digits, '.', '_' and '-', and start with a letter or digit")
    return name


class SourceConfig(Configuration):
    """One corpus, or one part of it."""

    kind: str = Field(json_schema_extra={"enum": ["synthetic", *sorted(READERS)]})
    """Layout: `synthetic` speech, or one listed by `starling corpus list`, such as `librispeech`, `kaldi`, `table`."""
    path: str = ""
    """Folder or file, relative to the configuration file; $VARIABLES are expanded. Not for `synthetic`."""
    corpus: str = ""
    """Name of the corpus, stored with each utterance; by default that of its folder, or of a table with a name of its
    own."""
    set: str = ""
    """Set of its utterances: `train`, `valid`, or any other name for a test set. Empty: the corpus' own split, or, if
    it has none, a speaker-disjoint split by `valid_share` and `test_share`."""
    own_split: bool = True
    """If `set` is empty: whether to use the corpus' own split; `false` ignores it and divides all utterances."""
    domain: str = ""
    """Domain, stored with each utterance."""
    language: str = "en"
    """Language code, stored with each utterance."""
    licence: str = Field(default="", max_length=200)
    """Licence of the speech, for the model card; by default the one in `starling corpus list`."""
    speakers: tuple[str, ...] = ()
    """Use only these speakers; empty: all."""
    exclude_speakers: tuple[str, ...] = ()
    """Leave out these speakers."""
    where: dict[str, str] = Field(default={})
    """For `table` and `commonvoice`: only rows whose columns have these values."""
    options: dict[str, Any] = Field(default={})
    """Further options of the layout, such as `{subset: S}` for `gigaspeech`; see `starling corpus list`."""
    limit: int = Field(default=0, ge=0)
    """Use only the first utterances, up to this number; 0: all."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of its training utterances that is used, drawn with the configuration's seed: of old speech beside new, for
    example, so that training goes on without forgetting. Other sets keep all of theirs."""
    min_confidence: float = Field(default=0.0, ge=0, le=1)
    """Training utterances whose confidence is lower are left out: doubtful transcripts and pseudo-labels; 0: none are.
    Other sets keep all of theirs."""
    synthesis: SynthesisConfig | None = None
    """For `synthetic`: amount of speech, and voices."""

    @property
    def corpus_name(self) -> str:
        """Name of the corpus, as its utterances have it."""
        return self.corpus or (corpus_name(self.path) if self.path else self.kind)

    _check_set = field_validator("set")(checked_name)

    @field_validator("speakers", "exclude_speakers")
    @classmethod
    def _compose(cls, speakers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(normalize("NFC", name) for name in speakers)  # as utterances have them

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in (*READERS, "synthetic"):
            known = sorted((*READERS, "synthetic"))
            raise ValueError(f"there is no corpus layout {kind!r}{nearest(kind, known)}")
        return kind

    @model_validator(mode="after")
    def _check_options(self) -> "SourceConfig":
        known = frozenset[str]() if self.kind == "synthetic" else reader_class(self.kind).options_known()
        given = {**self.options, **({"where": 0} if self.where else {})}
        if unknown := sorted(given.keys() - known):
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"sources of kind {self.kind!r} have no option {unknown[0]!r}; they have: {have}")
        return self

    @model_validator(mode="after")
    def _check_min_confidence(self) -> "SourceConfig":
        if self.min_confidence and (self.kind == "synthetic" or not reader_class(self.kind).CONFIDENCE):
            raise ValueError(
                f"utterances of kind {self.kind!r} have no confidence that min_confidence could be compared with: "
                "`starling align MODEL CORPUS -o aligned` writes aligned/utterances.csv, a source of kind table with "
                "the same utterances and their confidences"
            )
        if self.min_confidence and self.set not in ("", "train"):
            raise ValueError(
                f"min_confidence leaves out training utterances, and the set is {self.set!r}: error rates of what a "
                "model is sure of would be too good. Remove one of them"
            )
        return self

    @field_validator("options")
    @classmethod
    def _check_values(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"option {name!r} is {value!r}: use text, finite numbers, true or false, and lists and mappings of "
                    "these"
                ) from error
        return options

    @model_validator(mode="after")
    def _check_path(self) -> "SourceConfig":
        if self.kind != "synthetic" and not self.path:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        return self
