"""Tuning: a search for the decoder's best values on the validation set, for the decode stage and `starling search`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurable.addresses import address_content
from devices.choice import best_device
from recognition.decoder_tuning import DecoderTrials
from recognition.inference import drawn_rows, encode_set, open_set
from recognition.recognizer import Recognizer
from speech.features.cmvn import CmvnStats
from speech.scoring import ErrorCounts
from storage.reading import ShardError
from tasks.config.decoding import tuned_space
from tasks.dataset.sets import VALID
from tasks.figures import percent
from tasks.locking.slots import run_log
from tasks.search.methods.base import all_trials
from tasks.search.space import Space, Values
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.stages.decoder_files import decoder_of
from tasks.stages.features import FEATURES
from tasks.stages.run_sets import scored_sets, set_url


@dataclass(frozen=True)
class DecodedTrial:
    """Values of the decoder, and the errors that it makes with them."""

    values: Values
    """By field."""
    counts: ErrorCounts
    """Over all utterances."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return self.values | {"errors": self.counts.errors, "wer": self.counts.wer, "cer": self.counts.cer}


def best_trial(trials: Sequence[DecodedTrial], space: Space, configured: Values) -> DecodedTrial:
    """The trial with the fewest word errors.

    Among equal ones, the one with the fewest character errors; then the one whose values are fewest steps away from the
    configured ones; then the first.

    Args:
        trials: All trials.
        space: The space.
        configured: The configured values by field.
    """

    def steps(trial: DecodedTrial) -> float:
        return sum(p.steps(trial.values[name], configured[name]) for name, p in space.parameters.items())

    return min(trials, key=lambda trial: (trial.counts.errors, trial.counts.char_errors, steps(trial)))


def check_tuning(run: Run) -> None:
    """Check that parameters are not tuned on a set that is scored.

    Raises:
        StageError: If they are, or there is no validation set.
    """
    if run.config.tune is not None and VALID in scored_sets(run):
        raise StageError(
            "tune chooses the decoder's parameters on the validation set, which is scored, too, and its error rate "
            "would be too low. Give the data a test set, or remove the section tune and set the parameters in decode"
        )


def tuned_inputs(run: Run) -> dict[str, Any]:
    """What an address holds of the section `tune`.

    Raises:
        StageError: The validation set is scored.
    """
    check_tuning(run)
    tune = run.config.tune
    assert tune is not None
    space = tuned_space(run.config.decode, tune).parameters
    grid = {name: address_content(p) if p.when or not p.choices else list(p.choices) for name, p in space.items()}
    drawn = {} if tune.method.kind == "grid" else {"seed": run.config.seed}
    return {"tune": address_content(tune, without=("space",)) | drawn, "grid": grid}


def validation_trials(run: Run, bundle: Path, utterances: int, count: int) -> DecoderTrials[Any]:
    """Encode validation utterances once, to decode them with other values.

    Args:
        run: The run, with the stages that make what its decoder reads.
        bundle: The run's model.
        utterances: Number of utterances, drawn at random; a smaller set is used whole.
        count: Number of trials to expect.
    """
    speakers = {who: CmvnStats.from_dict(value) for who, value in FEATURES.record(run)["speakers"].items()}
    recognizer = Recognizer.load(bundle, decoder_of(run), str(best_device(run.config.train.device)), speakers)
    dataset = open_set(set_url(run, VALID, recognition=True), recognizer.spec.sample_rate, run.cache_folder)
    rows = drawn_rows(dataset, utterances, run.config.seed)
    encoded = [(list(part.texts), outputs) for part, outputs in encode_set(recognizer, dataset, rows, on_damage=_warn)]
    return DecoderTrials(recognizer, encoded, run.runner.count, count)


def tune_on_validation(run: Run, bundle: Path) -> dict[str, Any]:
    """Search for the decoder's best values on validation utterances.

    Args:
        run: The run; its configuration has the section `tune`.
        bundle: The run's model.

    Returns:
        Part of the decode stage's record: the set and its number of utterances, `configured` and `chosen` values, and
        a `table` with the error rates of all combinations.
    """
    tune = run.config.tune
    assert tune is not None
    method = tune.build(run.config.decode, run.config.seed)
    space = method.plan.space
    configured = {name: getattr(run.config.decode, name) for name in space.parameters}
    tried: list[DecodedTrial] = []
    with validation_trials(run, bundle, tune.utterances, method.total) as trials:

        def attempt(values: Values) -> float:
            values = configured | {name: type(configured[name])(value) for name, value in values.items()}
            tried.append(DecodedTrial(values, trials.errors(values)))
            progress.report("decode", len(tried), max(method.total, len(tried)), "tuning")
            return float(tried[-1].counts.errors)

        all_trials(method, attempt)
        if all(trial.values != configured for trial in tried):
            attempt({})
        utterances = trials.utterances
    best = best_trial(tried, space, configured)
    return {
        "set": VALID,
        "utterances": utterances,
        "words": best.counts.ref_words,
        "configured": configured,
        "chosen": best.values,
        "wer": best.counts.wer,
        "table": [trial.to_dict() for trial in tried],
    }


def _warn(error: ShardError) -> None:
    run_log().warning("a damaged shard of the validation set is left out: %s", error)


def tuned_text(tuning: dict[str, Any]) -> str:
    """The chosen values, and what they were chosen on.

    Args:
        tuning: Part of the decode stage's record.
    """
    chosen = ", ".join(f"{name} {value:g}" for name, value in tuning["chosen"].items())
    return f"chosen on {tuning['utterances']} utterances of {tuning['set']}: {chosen}, WER {percent(tuning['wer'])}"


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a decode stage's record: the chosen values, and the validation error rate with them."""
    tuning = record.get("tuning")
    if not tuning:
        return {}
    chosen = {f"decode.{name}": float(value) for name, value in tuning["chosen"].items()}
    return chosen | ({} if tuning["wer"] is None else {"decode.tuning_wer": tuning["wer"]})
