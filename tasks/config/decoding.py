"""What decoding needs of the rest of a configuration: a language model, and a validation set to tune weights on."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configurable.wording import nearest
from speech.decoding import DecodeConfig
from speech.decoding.rescoring import RescoredConfig
from speech.lm import LmConfig, NetworkConfig, arpa_of, kinds_with_arpa, unit_of
from tasks.config.mistakes import plain_message


class TuneConfig(BaseModel):
    """Which parameters of the decoder are chosen on the validation set."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    utterances: int = Field(default=200, ge=1)
    """Number of validation utterances, drawn at random; a smaller set is used whole."""
    grid: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Values to try by field of `decode`; empty: those that the decoder suggests. All combinations are tried, and the
    configured values with them."""


def uses_stage(decode: DecodeConfig, lm: LmConfig | None) -> bool:
    """Whether a decoder takes the language model of the stage `lm`: it reads one, and the configuration names none."""
    return lm is not None and decode.takes_language_model


def check_decoding(decode: DecodeConfig, lm: LmConfig | None, tune: TuneConfig | None, aligned: bool = False) -> None:
    """Check that the decoder has what it reads, and that its parameters can be tuned.

    Args:
        decode: The decoder.
        lm: The language model that is estimated, if one is.
        tune: What is tuned, if anything is.
        aligned: Whether there is a stage `align`.

    Raises:
        ValueError: If not; the message names the field and the remedy.
    """
    if lm is not None and uses_stage(decode, lm):
        _check_model(decode, lm)
    if decode.makes_graph:
        _check_graph(decode, lm, aligned)
    elif not uses_stage(decode, lm) and (lacking := decode.lacking()):
        raise ValueError(f"{lacking}; or add a section lm: the decoder then takes that language model and its words")
    if tune is not None:
        grid_of(decode, tune)


def check_rescoring(decode: DecodeConfig, lm: LmConfig) -> None:
    """Check that the decoder can rank hypotheses again with a language model that is estimated for that.

    Args:
        decode: The decoder.
        lm: The section `rescoring`.

    Raises:
        ValueError: If not; the message names the field and the remedy.
    """
    if not isinstance(decode, RescoredConfig):
        raise ValueError(
            f"rescoring ranks several hypotheses again, and decode.kind {decode.kind} cannot: use decode.kind words, "
            "graph, attention or transducer, or remove the section rescoring"
        )
    if decode.rescore_lm:
        raise ValueError("decode.rescore_lm and the section rescoring each give a second language model: remove one")
    if unit_of(lm) != "word" or not (arpa_of(lm) or isinstance(lm, NetworkConfig)):
        raise ValueError(
            f"rescoring needs a language model of words that can be read alone, and rescoring.kind {lm.kind} with unit "
            f"{unit_of(lm)} is none: use rescoring.kind ngram or lstm, and unit word"
        )
    try:
        type(decode).model_validate(decode.model_dump() | {"rescore_lm": "that of the stage"})
    except ValidationError as error:
        raise ValueError(f"rescoring: decode: {plain_message(error.errors()[0])}") from error


def _check_graph(decode: DecodeConfig, lm: LmConfig | None, aligned: bool) -> None:
    named = decode.files()
    sections = {"align": aligned or "hmm" in named, "lm": lm is not None or "lm" in named}
    if missing := [name for name, there in sections.items() if not there]:
        raise ValueError(f"{decode.lacking()}; or add the section {' and the section '.join(missing)}")


def _check_model(decode: DecodeConfig, lm: LmConfig) -> None:
    if not (arpa_of(lm) or (decode.reads_networks and isinstance(lm, NetworkConfig))):
        raise ValueError(
            f"decode.kind {decode.kind} reads ARPA files, and lm.kind {lm.kind} makes none: use lm.kind "
            f"{' or '.join(kinds_with_arpa())}, or name an ARPA file in decode.lm"
        )
    if unit_of(lm) != decode.lm_unit:
        raise ValueError(
            f"decode.kind {decode.kind} needs a language model of {decode.lm_unit}s: set lm.unit: {decode.lm_unit} (it "
            f"is {unit_of(lm)}), or name an ARPA file in decode.lm"
        )


def grid_of(decode: DecodeConfig, tune: TuneConfig) -> dict[str, list[Any]]:
    """The values to try by field, ascending, the configured ones among them.

    Raises:
        ValueError: If the decoder has no such field, or does not accept a value.
    """
    suggested: Mapping[str, Sequence[float]] = tune.grid or decode.grid
    if not suggested:
        raise ValueError(
            f"tune: decode.kind {decode.kind} has no parameters to tune: remove the section tune, or name fields and "
            "values in tune.grid"
        )
    grid: dict[str, list[Any]] = {}
    for name, values in suggested.items():
        if name not in (numbers := [field for field, value in decode if type(value) in (int, float)]):
            raise ValueError(f"tune.grid: {name} is not a number of decode.kind {decode.kind}{nearest(name, numbers)}")
        grid[name] = sorted({getattr(decode, name), *(_accepted(decode, name, value) for value in values)})
    return grid


def _accepted(decode: DecodeConfig, name: str, value: float) -> Any:
    """The value as the decoder's configuration takes it: a whole number for fields that are counts."""
    try:
        return getattr(type(decode).model_validate(decode.model_dump() | {name: value}), name)
    except ValidationError as error:
        raise ValueError(f"tune.grid.{name}: {value:g}: {plain_message(error.errors()[0])}") from error
