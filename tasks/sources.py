"""Configuration of one corpus: where it is, how it lies there, and which of it is taken."""

import difflib
import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from speech.synthesis.corpus import SynthesisConfig
from storage.corpora import READERS, reader_class

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_name(text: str) -> bool:
    """Whether a text can name a model, a set, an object and a metric alike."""
    return bool(_NAME.fullmatch(text))


def checked_name(name: str) -> str:
    """A name as it is.

    Raises:
        ValueError: It is none; an empty one passes.
    """
    if name and not is_name(name):
        raise ValueError(f"{name!r}: use letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


def nearest(name: str, candidates: list[str]) -> str:
    """The end of a message about an unknown name: the candidate that may have been meant, or all of them."""
    initials = "".join(word[:1] for word in name.split("_"))
    if len(initials) > 1 and initials in candidates:  # learning_rate is lr
        return f"; did you mean {initials!r}?"
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(candidates)}" if candidates else ""


class SourceConfig(BaseModel):
    """One corpus, or one part of it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    kind: str = Field(json_schema_extra={"enum": ["synthetic", *sorted(READERS)]})
    """Layout: `synthetic` speech, or one that `starling corpus list` names, such as `librispeech`, `kaldi`, `table`."""
    path: str = ""
    """Folder or file; relative to the configuration file, and $VARIABLES are filled in. Not for `synthetic`."""
    corpus: str = ""
    """Name of the corpus, kept with each utterance; by default the path's last part."""
    set: str = ""
    """Set that its utterances belong to: `train`, `valid`, or any other name for a test set. Empty: the corpus' own
    split, or, if it brings none, a speaker-disjoint split by `valid_share` and `test_share`."""
    own_split: bool = True
    """Where `set` is empty: whether the corpus' own split counts; `false` ignores it and divides all utterances."""
    domain: str = ""
    """Domain, kept with each utterance."""
    language: str = "en"
    """Language code, kept with each utterance."""
    licence: str = Field(default="", max_length=200)
    """Under which the speech is given, for the model's card; by default what `starling corpus list` says of it."""
    speakers: tuple[str, ...] = ()
    """Only these speakers; empty takes all."""
    exclude_speakers: tuple[str, ...] = ()
    """Not these speakers."""
    where: dict[str, str] = {}
    """For `table` and `commonvoice`: only rows whose columns have these values."""
    options: dict[str, Any] = {}
    """What else the layout's reader takes, such as `{subset: S}` for `gigaspeech`; `starling corpus list` names it."""
    limit: int = Field(default=0, ge=0)
    """Take only this many utterances, the first ones; 0 takes all."""
    synthesis: SynthesisConfig | None = None
    """For `synthetic`: how much speech, by which voices."""

    _check_set = field_validator("set")(checked_name)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in (*READERS, "synthetic"):
            known = sorted((*READERS, "synthetic"))
            raise ValueError(f"there is no corpus layout {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")
        return kind

    @model_validator(mode="after")
    def _check_options(self) -> "SourceConfig":
        known = frozenset[str]() if self.kind == "synthetic" else reader_class(self.kind).OPTIONS
        given = {**self.options, **({"where": 0} if self.where else {})}
        if unknown := sorted(given.keys() - known):
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"sources of kind {self.kind!r} have no option {unknown[0]!r}; they have: {have}")
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
