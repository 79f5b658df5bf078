"""Tuning of the decoder's parameters on the validation set, for the decode stage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devices.choice import best_device
from recognition.decoder_tuning import best_trial, try_all
from recognition.inference import drawn_rows, encode_set, open_set
from recognition.recognizer import Recognizer
from speech.features.cmvn import CmvnStats
from storage.reading import ShardError
from tasks.config.decoding import grid_of
from tasks.dataset.sets import VALID
from tasks.figures import percent
from tasks.locking.slots import run_log
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.stages.decoder_files import decoder_of
from tasks.stages.features import FEATURES
from tasks.stages.run_sets import scored_sets, set_url


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


def tune_on_validation(run: Run, bundle: Path) -> dict[str, Any]:
    """Try all values of the decoder's grid on validation utterances.

    Args:
        run: The run; its configuration has the section `tune`.
        bundle: The run's model.

    Returns:
        Part of the decode stage's record: the set and its number of utterances, `configured` and `chosen` values, and
        a `table` with the error rates of all combinations.
    """
    tune = run.config.tune
    assert tune is not None
    decode = decoder_of(run)
    grid = grid_of(run.config.decode, tune)
    configured = {name: getattr(decode, name) for name in grid}
    speakers = {who: CmvnStats.from_dict(value) for who, value in FEATURES.record(run)["speakers"].items()}
    recognizer = Recognizer.load(bundle, decode, str(best_device(run.config.train.device)), speakers)
    dataset = open_set(set_url(run, VALID, recognition=True), recognizer.spec.sample_rate, run.cache_folder)
    rows = drawn_rows(dataset, tune.utterances, run.config.seed)
    encoded = [(list(part.texts), outputs) for part, outputs in encode_set(recognizer, dataset, rows, on_damage=_warn)]
    trials = try_all(recognizer, encoded, grid, run.runner.count, _report)
    best = best_trial(trials, grid, configured)
    return {
        "set": VALID,
        "utterances": sum(len(texts) for texts, _ in encoded),
        "words": best.counts.ref_words,
        "configured": configured,
        "chosen": best.values,
        "wer": best.counts.wer,
        "table": [trial.to_dict() for trial in trials],
    }


def _report(done: int, total: int) -> None:
    progress.report("decode", done, total, "tuning")


def _warn(error: ShardError) -> None:
    run_log().warning("tuning leaves out a damaged shard of the validation set: %s", error)


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
