"""The model that a training begins with: looked up when a run begins, and the same until its end.

`train.init` names it; without, a pretrained kind of model begins with what `model.source` names.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch
from mlflow.exceptions import MlflowException

from recognition.bundle import SPEC, WEIGHTS, BundleSpec
from recognition.data.dataset import check_vocabulary
from recognition.initial_weights import (
    PRETRAINED,
    SourceError,
    SourceModel,
    Transfer,
    check_fields,
    check_kind,
    check_source,
    open_source,
    transfer_weights,
)
from recognition.pretrained import PretrainedError, PretrainedModel, read_pretrained, read_pretrained_source
from recognition.system import SystemConfig
from speech.models import ModelConfig, PretrainedConfig
from speech.tokens import BLANK_SYMBOL, TokenConfig, TokenError, Tokenizer, tokenizer_from_dict, train_tokenizer
from storage.batching import derive_seed
from storage.objects import ObjectMissingError, ObjectStore
from tasks.config.model_names import registered_uri
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.tracking.fetching import download_bundle
from tasks.tracking.known_models import model_names
from tasks.tracking.registry import CHAMPION, get_version, version_of
from tasks.tracking.runs import client

INITIAL_TAG = "starling.initial"
"""Tag of an MLflow run and of a version: the model that the training began with."""


@dataclass(frozen=True)
class InitialModel:
    """The model that a run's training begins with.

    Attributes:
        given: What `train.init` says.
        name: What that was when the run began: `models:/NAME/VERSION`, or a folder or URL; without one, or if a first
            run has no champion yet, what `model.source` says, or empty.
        read: Reads the model.
        named: Whether it is the one that `train.init` names.
    """

    given: str
    name: str
    read: Callable[[], SourceModel]
    named: bool = False

    @cached_property
    def source(self) -> SourceModel:
        """The model itself; read at first use."""
        return self.read()


def _read(run: Run, name: str) -> SourceModel:
    """A registered model, or that in a folder or at a URL.

    Raises:
        StageError: There is none, or it does not fit.
    """
    try:
        source = _open(run, name)
        pretrained, model = source.pretrained, source.model
        if pretrained is None:
            return run.config.system.as_asked(source)
        assert isinstance(model, PretrainedConfig)
        model.check_packages()
        pretrained.check(model, run.config.features, run.config.data.sample_rate)
        return run.config.system.of_pretrained(pretrained).pretrained_source(pretrained, source)
    except SourceError as error:
        raise StageError(str(error)) from error
    except (OSError, ValueError) as error:
        raise StageError(f"train.init: {error}") from error


def _open(run: Run, name: str) -> SourceModel:
    """A model as its format has it."""
    if name.startswith("models:/"):
        return open_source(download_bundle(name), name)
    if "://" not in name:
        return open_source(Path(name), name)
    store = ObjectStore(name)
    if store.exists(PRETRAINED) and not store.exists(SPEC):
        return read_pretrained_source(name, run.cache_folder)
    with TemporaryDirectory(prefix="starling-initial-") as folder:
        for file in (WEIGHTS, SPEC):
            try:
                store.fetch_into(file, Path(folder) / file)
            except ObjectMissingError as error:
                raise SourceError(
                    f"train.init: {name} is no bundle, it has no {file}, and no pretrained model, it has no "
                    f"{PRETRAINED}: give another"
                ) from error
        return open_source(Path(folder), name)


def _own_pretrained(run: Run) -> PretrainedModel | None:
    """The pretrained model that `model.source` names, read once in a run; None for models of other kinds.

    Raises:
        StageError: If it cannot be used, or was trained on other features.
    """
    model = run.config.model
    if not isinstance(model, PretrainedConfig) or not model.source:
        return None
    if run.pretrained is None:
        try:
            model.check_packages()
            pretrained = read_pretrained(model, run.cache_folder)
            if not model.encoder:
                pretrained.check(model, run.config.features, run.config.data.sample_rate)
        except PretrainedError as error:
            raise StageError(f"model.source: {error}") from error
        except ValueError as error:
            raise StageError(str(error)) from error
        run.pretrained = pretrained
    return run.pretrained


def pretrained_model(run: Run) -> PretrainedModel | None:
    """The pretrained model that a run's training begins with; None if it begins with another one.

    Raises:
        StageError: If it cannot be used.
    """
    initial = initial_model(run)
    return initial.source.pretrained if initial else None


def about_pretrained(run: Run) -> dict[str, str] | None:
    """What is known of the pretrained model that training begins with, or that the model is from; None without one."""
    initial = initial_model(run)
    if initial is None:
        return None
    pretrained = initial.source.pretrained
    return pretrained.about() if pretrained else initial.source.began_with


def model_config(run: Run) -> ModelConfig:
    """The model's configuration with all its sizes: those of a pretrained one come with what training begins with.

    Raises:
        StageError: If that cannot be used, or there is none.
    """
    model = run.config.model
    if not isinstance(model, PretrainedConfig) or model.encoder:
        return model
    initial = initial_model(run)
    if initial is None:
        raise StageError(
            f"model.source is empty, and train.init {run.config.train.init} is no model yet: name the pretrained model "
            f"that the first training of a {model.kind} begins with in model.source"
        )
    try:
        check_kind(initial.source, model, initial.name)
    except SourceError as error:
        raise StageError(str(error)) from error
    given = {name: getattr(model, name) for name in model.model_fields_set}
    return initial.source.model.model_copy(update=given)


def system_config(run: Run) -> SystemConfig:
    """The system with all its sizes: those of a pretrained decoder network come with what training begins with.

    Raises:
        StageError: If that cannot be used.
    """
    initial, system = initial_model(run), run.config.system
    if initial is None:
        return system
    pretrained = initial.source.pretrained
    try:
        return system.of_pretrained(pretrained) if pretrained else system.of_model(initial.source)
    except ValueError as error:
        raise StageError(f"recognizer: {initial.name}: {error}") from error


def initial_model(run: Run) -> InitialModel | None:
    """The model that a run's training begins with; None if it begins with random weights.

    An alias is looked up once in a run, so that a champion that changes meanwhile does not mix two models.

    Raises:
        StageError: If there is no such model, or the registry does not answer.
    """
    given = run.config.train.init
    initial = run.initial
    if initial is None or initial.given != given:
        otherwise = _own_name(run.config.model) or "random weights"
        name = _looked_up(given, run.config.model_name, otherwise) if given else ""
        named = InitialModel(given, name, partial(_read, run, name), named=True)
        run.initial = initial = named if name else _own_source(run, given)
    return initial if initial.name else None


def _own_name(model: ModelConfig) -> str:
    """The pretrained model that a kind of model begins with by itself; empty if there is none."""
    return model.source if isinstance(model, PretrainedConfig) else ""


def _own_source(run: Run, given: str) -> InitialModel:
    """What a run's kind of model begins with by itself: the pretrained model that `model.source` names, if it has one.

    Raises:
        StageError: If that cannot be used.
    """
    model, pretrained = run.config.model, _own_pretrained(run)
    if pretrained is None:
        return InitialModel(given, "", partial(_read, run, ""))
    assert isinstance(model, PretrainedConfig)
    try:
        sized, system = pretrained.sized(model), run.config.system.of_pretrained(pretrained)
        source = system.pretrained_source(pretrained, pretrained.source_model(sized))
    except ValueError as error:
        raise StageError(f"recognizer: model.source {pretrained.name}: {error}") from error
    return InitialModel(given, pretrained.name, lambda: source)


def check_initial(run: Run) -> None:
    """Check that the model that a run's training begins with is there, and fits as far as the configuration tells.

    Raises:
        StageError: If not; the message names the field and the remedy.
    """
    initial = initial_model(run)
    if initial is None or not initial.named:
        return
    config = run.config
    try:
        check_fields(initial.source, model_config(run), config.features, config.data.sample_rate, initial.name)
    except SourceError as error:
        raise StageError(str(error)) from error


def begins_with(run: Run) -> dict[str, str]:
    """What was given as the model that training begins with, what that was, and its digest; empty without one."""
    initial = initial_model(run)
    return {"given": initial.given, "model": initial.name, "digest": initial.source.digest} if initial else {}


def initial_tags(run: Run) -> dict[str, str]:
    """The tag of an MLflow run or a version that tells which model its training began with."""
    initial = initial_model(run)
    return {INITIAL_TAG: initial.name} if initial else {}


def _looked_up(given: str, own: str, otherwise: str) -> str:
    """What `train.init` names: `models:/NAME/VERSION`, or a folder or URL; empty if a first run has no champion yet.

    Args:
        given: What it says.
        own: Name of the configuration's own model.
        otherwise: What training begins with if that has no champion yet.

    Raises:
        StageError: There is no such model, or the registry does not answer.
    """
    uri = registered_uri(given, own)
    if not uri:
        return given
    name, _, alias = uri.removeprefix("models:/").partition("@")
    api = client()
    try:
        if not alias:
            name, _, version = name.partition("/")
            return f"models:/{name}/{get_version(api, name, version).version}"
        if (registered := version_of(api, name, alias)) is not None:
            return f"models:/{name}/{registered.version}"
        known = model_names(api)
    except MlflowException as error:
        raise StageError(f"train.init: {given} cannot be looked up in the model registry: {error}") from error
    except ValueError as error:
        raise StageError(f"train.init: {error}") from error
    # a nightly run's first nights, until a version has learned something
    if name == own and (alias == CHAMPION or name not in known):
        why = "no champion" if name in known else "no version"
        progress.announce("train", f"{name} has {why} yet: training begins with {otherwise}")
        return ""
    raise StageError(
        f"train.init: {name} has no version with the alias @{alias}: give NAME/VERSION, or an alias that "
        f"`starling models {name}` lists"
        if name in known
        else f"train.init: the registry has no model {name}; it has {', '.join(known) or 'none'}: give one of them"
    )


# --- what the new model keeps of it


def initial_tokens(run: Run, texts: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """The tokens of a run's model: those of the model that it begins with, or those of its training transcripts.

    Args:
        run: The run.
        texts: Yields the training transcripts; called again for each pass over them.

    Raises:
        StageError: If the transcripts have symbols that the kept tokens do not have.
    """
    initial, choice = initial_model(run), run.config.train.init_tokens
    known = initial.source.tokenizer if initial else None
    if known is None or choice == "data" or run.config.system.targets != "tokens":
        return train_tokenizer(run.config.tokens, texts()).to_dict()
    assert initial is not None
    if choice == "extended":
        return _extended(known, texts(), initial.name).to_dict()
    try:
        check_vocabulary(known, pa.array(texts(), pa.string()))
    except TokenError as error:
        raise StageError(
            f"train.init: {error}. These are the tokens of {initial.name}: set train.init_tokens to extended, which "
            "adds what is missing, or to data, which takes those of the training transcripts"
        ) from error
    return known.to_dict()


def _extended(known: Tokenizer, texts: Iterable[str], name: str) -> Tokenizer:
    """Tokens with those of transcripts behind them that are new."""
    value = known.to_dict()
    if "symbols" not in value:
        raise StageError(
            f"train.init_tokens is extended, and the {known.kind} tokens of {name} cannot be: use source, or data"
        )
    trained = train_tokenizer(TokenConfig.model_validate({"kind": known.kind, "vocab_size": 1 << 30}), texts)
    new = [symbol for symbol in trained.symbols if symbol not in {*known.symbols, BLANK_SYMBOL}]
    return tokenizer_from_dict(value | {"symbols": [*value["symbols"], *new]})


def initial_stats(run: Run, own: dict[str, Any] | None) -> dict[str, Any] | None:
    """The feature statistics of a run's model: those of the model that it begins with, or its training set's.

    Args:
        run: The run.
        own: Statistics of the training set; None if the features need none.
    """
    initial = initial_model(run)
    kept = own is not None and initial is not None and run.config.train.init_statistics == "source"
    return initial.source.stats if initial and kept and initial.source.stats else own


def transfer_initial(run: Run, spec: BundleSpec) -> Transfer | None:
    """What a run's network takes from the model that it begins with; None if it begins with random weights.

    Raises:
        StageError: If the model does not fit; the message says what differs, and the remedy.
    """
    initial = initial_model(run)
    if initial is None:
        return None
    try:
        check_source(initial.source, spec, initial.name)
        torch.manual_seed(derive_seed("init", run.config.training_seed))
        return transfer_weights(initial.source, spec, spec.build_model())
    except ValueError as error:
        raise StageError(str(error)) from error
