"""What decoding needs of the rest of a configuration: a language model, and a validation set to tune weights on."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from configurable.configuration import Configuration
from configurable.wording import nearest
from speech.decoding import DecodeConfig
from speech.decoding.rescoring import RescoredConfig
from speech.lm import LmConfig, NetworkConfig, arpa_of, kinds_with_arpa, unit_of
from tasks.config.mistakes import plain_message
from tasks.search.methods import MethodChoice
from tasks.search.methods.base import SearchMethod, SearchPlan, check_untrained
from tasks.search.methods.grid import GridConfig
from tasks.search.space import ParameterConfig, Space, SpaceError, Values


class TuneConfig(Configuration):
    """A search for values of the decoder on the validation set, of which a run takes the best."""

    utterances: int = Field(default=200, ge=1)
    """Number of validation utterances, drawn at random; a smaller set is used whole."""
    method: MethodChoice = GridConfig()
    """How values are chosen: `grid` tries all combinations, `random` draws each, and `tpe` models the results."""
    space: dict[str, ParameterConfig] = Field(default_factory=dict)
    """Fields of `decode` to vary, such as `lm_weight`, each with a list of choices or a range; empty: those that the
    decoder suggests. The configured values are always tried, too: a grid has them in each of its lists."""
    trials: int = Field(default=0, ge=0, le=1_000_000)
    """Number of combinations to try; 0: all of a grid, otherwise 20."""

    @model_validator(mode="before")
    @classmethod
    def _former_grid(cls, value: Any) -> Any:
        """Deployments and older configurations name lists of values in `grid`."""
        if not isinstance(value, Mapping) or "grid" not in value:
            return value
        if value.get("space"):
            raise ValueError("grid is the former name of space: write all fields in space")
        return {**{name: part for name, part in value.items() if name != "grid"}, "space": value["grid"]}

    def build(self, decode: DecodeConfig, seed: int = 1) -> SearchMethod:
        """The method at work on the decoder's fields.

        Args:
            decode: The decoder.
            seed: Seed of its draws.

        Raises:
            ValueError: It cannot search them, or a package is missing.
        """
        check_untrained(self.method, "tune")
        return self.method.build(SearchPlan(tuned_space(decode, self), 0, self.trials, seed))


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
    if tune is not None and tune.method.kind == "tpe":  # which refuses no space, and imports Optuna
        tuned_space(decode, tune)
    elif tune is not None:
        tune.build(decode)


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


def check_searched(decode: DecodeConfig, names: Iterable[str], where: str) -> None:
    """Check that fields can be searched without training: numbers, with which the same decoder searches again.

    Args:
        decode: The decoder.
        names: Fields of `decode`.
        where: The section of the configuration that names them.

    Raises:
        ValueError: If not; the message names the field.
    """
    numbers = [field for field, value in decode if type(value) in (int, float)]
    for name in names:
        if name not in numbers:
            raise ValueError(f"{where}: {name} is not a number of decode.kind {decode.kind}{nearest(name, numbers)}")


def tuned_space(decode: DecodeConfig, tune: TuneConfig) -> Space:
    """The values to try; lists, and all that a grid tries, are ascending, the configured values among them.

    Raises:
        ValueError: If the decoder has no such field, or does not accept a value.
    """
    if not (tune.space or decode.grid):
        raise ValueError(
            f"tune: decode.kind {decode.kind} has no parameters to tune: remove the section tune, or name fields and "
            "values in tune.space"
        )
    space = Space(tune.space or {name: ParameterConfig(choices=values) for name, values in decode.grid.items()}, "tune")
    check_searched(decode, space.parameters, "tune.space")

    def why_not(values: Values) -> str:
        try:
            type(decode).model_validate(decode.model_dump() | values)
        except ValidationError as error:
            return plain_message(error.errors()[0])
        return ""

    if mistakes := list(space.refused(why_not)):
        raise SpaceError("; ".join(mistakes))
    lists = space.axes() if tune.method.kind == "grid" else {n: p.choices for n, p in space.parameters.items()}
    parameters = dict(space.parameters)
    for name, values in lists.items():
        if values:
            configured = getattr(decode, name)
            choices = sorted({configured, *(type(configured)(float(value)) for value in values)})
            parameters[name] = ParameterConfig(choices=tuple(choices), when=parameters[name].when)
    return Space(parameters, "tune")
