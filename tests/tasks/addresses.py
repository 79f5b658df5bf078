"""Every field that a stage's address may depend on, and the addresses of all stages, without running one.

`python tests/tasks/addresses.py BUNDLE FILE` prints the addresses of all kinds of configurations as JSON, in an
interpreter where every configuration class has one more field.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

ROOMS = ("configurable", "speech", "storage", "training", "tasks")
Place = tuple[str | int, ...]


def _added_to_every_class() -> None:
    """Give the configuration classes that are defined from now on another field, as a later version might."""
    meta: Any = type(BaseModel)
    make = meta.__new__

    def with_field(cls: Any, name: str, bases: Any, namespace: dict[str, Any], **options: Any) -> Any:
        if namespace.get("__module__", "").split(".")[0] in ROOMS:
            namespace.setdefault("__annotations__", {})["added_later"] = int
            namespace["added_later"] = 7
        return make(cls, name, bases, namespace, **options)

    meta.__new__ = with_field


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    _added_to_every_class()

from configurable.choices import Choice, choice_of  # noqa: E402
from recognition.systems.gmm import GmmSystem  # noqa: E402
from speech.decoding import WordsConfig  # noqa: E402
from speech.features import FmllrConfig, IvectorConfig, MfccConfig  # noqa: E402
from speech.hmm.config import AlignConfig  # noqa: E402
from speech.lm import LstmConfig, NgramConfig  # noqa: E402
from storage.stages import stage_key  # noqa: E402
from tasks import STAGES  # noqa: E402
from tasks.config.data import DataConfig  # noqa: E402
from tasks.config.lm_training import LmTrainConfig  # noqa: E402
from tasks.config.pipeline import PipelineConfig  # noqa: E402
from tasks.config.realign import RealignConfig  # noqa: E402
from tasks.config.training import AcousticTrainConfig  # noqa: E402
from tasks.dataset.sources import SourceConfig  # noqa: E402
from tasks.search.space import ParameterConfig  # noqa: E402
from tasks.stages import prepare, realign, train  # noqa: E402
from tasks.stages.base import Run, StageResult, get_stage, stages_of  # noqa: E402
from tasks.stages.sources import synthetic_table  # noqa: E402
from training.strategies.registry import STRATEGY_CONFIGS  # noqa: E402

SYNTHESIS = "synthetic speech"
_SETS = {name: {"digest": f"{name} digest"} for name in ("train", "valid", "test")}
_MADE = {"lm": "lm.arpa", "network": "lm.safetensors", "graph": "HCLG.fst", "words": "words.txt"}
_RECORD = {
    "digest": "digest",
    "sets": _SETS,
    "stats": None,
    "speakers": {},
    "files": _MADE,
    "sha256": dict.fromkeys(_MADE.values(), "0"),
}


def replace_inputs(put: Any) -> None:
    """Replace what stages read beside configuration and records: corpora and alignments; models are read once.

    Args:
        put: As `setattr`.
    """
    put(prepare, "open_numbered", lambda number, source: SimpleNamespace(fingerprint=lambda: "corpus"))
    put(train, "read_alignments", lambda store, name: SimpleNamespace(digest=name))
    copy, digests = realign.copy_network, dict[Path, str]()

    def copied_once(source: Path, folder: Path) -> str:
        if source not in digests:
            digests[source] = copy(source, folder)
        return digests[source]

    put(realign, "copy_network", copied_once)


def addresses(config: PipelineConfig) -> dict[str, str]:
    """The address of each stage that a configuration has, and of synthetic speech.

    Earlier stages have given what they always give, so an address differs only if the stage itself reads another
    configuration.
    """
    run = Run(config, "run")
    for name in STAGES:
        run.results[name] = StageResult(name, "key", f"memory://objects/{name}/key", 0.0, True, {}, _RECORD)
    for name in ("realign", "restore"):
        if getattr(config, name) is None:
            del run.results[name]
    keys = {name: stage_key(name, get_stage(name).version, *get_stage(name).inputs(run)) for name in stages_of(config)}
    return keys | {SYNTHESIS: synthetic_table(config.data.sources[0]).parent.name}


def whole(bundle: Path) -> PipelineConfig:
    """A configuration with every section.

    Args:
        bundle: The model that aligns again.
    """
    return PipelineConfig(
        name="whole",
        data=DataConfig(sources=(SourceConfig(kind="table", path="corpus"),)),
    ).model_copy(
        update={
            "align": AlignConfig(),
            "realign": RealignConfig(model=str(bundle)),
            "lm": LstmConfig(),
            "train": AcousticTrainConfig(strategy=STRATEGY_CONFIGS["adpsgd"]()),
            "lm_train": LmTrainConfig(strategy=STRATEGY_CONFIGS["adpsgd"]()),
            "rescoring": NgramConfig(),
            "decode": WordsConfig(),
        }
    )


def configurations(bundle: Path, file: Path) -> Iterator[tuple[PipelineConfig, Place]]:
    """Configurations that together have every stage and every kind, and the section of each that is to be varied."""
    config = whole(bundle)
    yield config, ()
    recognize = config.align.recognize.model_copy(update={"arpa": __file__})
    yield changed(config, ("align", "recognize"), recognize).model_copy(update={"recognizer": GmmSystem()}), ("align",)
    parts = (FmllrConfig(), MfccConfig(), IvectorConfig())
    for place, part in enumerate(parts):
        appended = {"kind": "appended", "parts": (part, *parts[:place], *parts[place + 1 :])}
        features = choice_of(PipelineConfig.model_fields["features"]).kinds["appended"].model_construct(**appended)
        yield config.model_copy(update={"features": features}), ("features", "parts", 0)
    yield config.model_copy(update={"features": FmllrConfig()}), ("align", "recognize")


def at(value: Any, place: Place) -> Any:
    """The part of a configuration at a place."""
    for step in place:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def changed(config: Any, place: Place, value: Any) -> Any:
    """A configuration with another value at a place, without validation: addresses do not depend on it."""
    if not place:
        return value
    step, rest = place[0], place[1:]
    if isinstance(step, int):
        return (*config[:step], changed(config[step], rest, value), *config[step + 1 :])
    return config.model_copy(update={step: changed(getattr(config, step), rest, value)})


class Varied(SimpleNamespace):
    """A field with another value.

    Attributes:
        field: Class that declares it, and its name.
        default: Its default value, as JSON; None if it is required.
        place: Where it is in the configuration.
        before: The configuration.
        after: The configuration with another value.
        of_kind: Whether the value is a configuration of another kind.
    """

    @property
    def path(self) -> str:
        """The place as text."""
        return ".".join(map(str, self.place))


def variations(config: PipelineConfig, place: Place, file: Path, kinds_only: bool = False) -> Iterator[Varied]:
    """Each field below a place with another value, in a configuration of each kind; inherited fields once.

    Args:
        config: The configuration.
        place: The part.
        file: A file that fields of paths name.
        kinds_only: Vary nothing but the kind of choices, and whether optional parts are there.
    """
    seen: set[tuple[Any, ...]] = set()
    for variation in _variations(config, place, file, kinds_only):
        key = (
            variation.place,
            variation.field,
            type(at(variation.after, variation.place)) if variation.of_kind else None,
        )
        if key not in seen:
            seen.add(key)
            yield variation


def _variations(config: PipelineConfig, place: Place, file: Path, kinds_only: bool) -> Iterator[Varied]:
    section = at(config, place)
    for name, field in type(section).model_fields.items():
        here, value = (*place, name), getattr(section, name)
        owner = next(cls for cls in type(section).__mro__ if name in vars(cls).get("__annotations__", {}))
        default = None if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))
        about = {"field": f"{owner.__name__}.{name}", "default": default, "place": here, "before": config}
        parts = list(_parts(field, value))
        for part in parts:
            variant = changed(config, here, part)
            if part != value:
                yield Varied(**about, after=variant, of_kind=True)
            inside = (*here, 0) if isinstance(part, tuple) else here
            yield from _variations(variant, inside, file, kinds_only)
        kind = isinstance(section, Choice) and name == "kind"
        if not parts and not kinds_only and not kind:
            other = ("valid",) if here == ("score", "sets") else _other(field, value, file)
            yield Varied(**about, after=changed(config, here, other), of_kind=False)


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from classes(part)


def _parts(field: FieldInfo, value: Any) -> Iterator[Any]:
    """Configurations that a field may have: the present one and one of each other kind, or of the class."""
    if isinstance(value, dict):  # by names that a user gives: varied as one value
        return
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        yield value
        return
    if isinstance(value, BaseModel):
        yield value
    choice = choice_of(field)
    for kind in choice.kinds.values() if choice else classes(field.annotation):
        if type(value) is not kind and not kind.__abstractmethods__ and not _contains_itself(kind):
            required = {name: "" for name, inner in kind.model_fields.items() if inner.is_required()}
            yield kind.model_construct(**required)


def _contains_itself(cls: type[BaseModel]) -> bool:
    """Whether it is `AppendedConfig`, whose parts are features of other kinds."""
    return "parts" in cls.model_fields


def _other(field: FieldInfo, value: Any, file: Path) -> Any:
    """Another value of about the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if value is None:
        return 1
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != value)
    if isinstance(value, str):
        return str(file)
    if isinstance(value, dict):
        searched = ParameterConfig in classes(field.annotation)
        return {"beam": ParameterConfig(choices=(99,)) if searched else (99.0,)}
    return (*value, *(value[:1] or (str(file),)))


def of_all_kinds(bundle: Path, file: Path) -> dict[str, dict[str, str]]:
    """The addresses of all stages for each kind of each part."""
    by_kind = {}
    for number, (config, place) in enumerate(configurations(bundle, file)):
        by_kind[f"{number}"] = addresses(config)
        for variation in variations(config, place, file, kinds_only=True):
            if variation.path == "restore":  # needs a pretrained model
                continue
            part = at(variation.after, variation.place)
            by_kind[f"{number} {variation.path} {getattr(part, 'kind', '')}"] = addresses(variation.after)
    return by_kind


if __name__ == "__main__":
    replace_inputs(setattr)
    assert all("added_later" in cls.model_fields for cls in (PipelineConfig, SourceConfig, WordsConfig, MfccConfig))
    print(json.dumps(of_all_kinds(Path(sys.argv[1]), Path(sys.argv[2]))))
