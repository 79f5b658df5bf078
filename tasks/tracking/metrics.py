"""Translates the training journal into metrics of each learner and of the training as a whole.

Metric names: `training/loss`, `training/lr`, ... averaged over the learners at the total of their steps;
`training/valid_loss`, `training/train_loss` and `WER/valid_wer` per epoch. MLflow sorts folders and the metrics in them
by name, capitals first, and shows metrics without a folder below. So the folders of less interest have later names.
`training-engine/` has the speed, the number of nodes, and the figures of the exchange; `training-final/` the figures of
the model that is kept; `training-progress/` what only grows: time, epochs and amounts of data.
`training-single-learners/` has `<field>.<node>.<rank>` of one learner at its own steps, and `valid_loss.<node>` of a
node per epoch; trainings of many learners have none.
`system/node-<node>/…` are figures of a machine, with MLflow's own names, so that its page of system metrics shows them.

A resume voids entries that a lost process wrote after its checkpoint, but they may have been sent. Then a step has two
values; the later one has the later time, so a chart shows it last. If a training ends at a lower step than a voided
entry, `closing_points` repeats the last valid value at the highest step, so that MLflow's last value is right.

A metric never has two points with the same time: MLflow copies a run's metrics to the model that is logged with it, and
refuses two values of a metric at the same time and step. Clocks that stop while a training waits for its nodes, or that
differ between nodes, would give such points, so each point is at least a millisecond later than the previous one.
"""

import logging
import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Entry = dict[str, Any]
_LEARNER_FIELDS = (
    *("loss", "lr", "grad_norm", "utterances", "audio_seconds"),
    *("step_s", "exchange_s", "exchanges_per_step", "staleness", "distance", "failed", "divided"),
)
_MEAN_FIELDS = ("loss", "lr", "grad_norm", "step_s", "exchange_s", "exchanges_per_step", "staleness", "distance")
ERRORS, _TRAINING, _LEARNERS = "WER/", "training/", "training-single-learners/"
_ENGINE, _FINAL, _PROGRESS = "training-engine/", "training-final/", "training-progress/"
_FOLDERS = {
    "valid_wer": ERRORS,
    **dict.fromkeys(("distance", "exchange_s", "exchanges_per_step", "nodes", "staleness", "step_s"), _ENGINE),
    **dict.fromkeys(("throughput", "failed", "divided"), _ENGINE),
    **dict.fromkeys(("audio_seconds", "elapsed", "epoch", "repeated", "unalignable", "utterances"), _PROGRESS),
}
"""Folders of the fields of the whole training that are not in `training/`."""
VALID_WER = f"{ERRORS}valid_wer"
"""Metric: word error rate of the validation set, of each epoch."""
ELAPSED = f"{_PROGRESS}elapsed"
"""Metric: seconds of training over all sessions, without the pauses between them."""
_SYSTEM = "system/"
_SYSTEM_FIELDS = {
    "cpu": "cpu_utilization_percentage",
    "memory": "system_memory_usage_percentage",
    "memory_mb": "system_memory_usage_megabytes",
    "received_mb_per_s": "network_receive_megabytes_per_second",
    "sent_mb_per_s": "network_transmit_megabytes_per_second",
}
_GPU_FIELDS = {
    "load": "utilization_percentage",
    "memory": "memory_usage_percentage",
    "memory_mb": "memory_usage_megabytes",
    "watts": "power_usage_watts",
}
_GLOBAL_FIELDS = (*_MEAN_FIELDS, "epoch", "elapsed", "nodes", "throughput")
_LONGEST_S = 1e9
"""Maximum elapsed time (30 years); larger values are ignored, since all later points would have to be later."""
_MOST_STEPS = 1 << 53
_LONGEST_NAME = 250
_log = logging.getLogger(__name__)


class MetricPoint(NamedTuple):
    """One value of one metric."""

    name: str
    value: float
    at_ms: int
    """Milliseconds of training; after a resume, later than all points before."""
    step: int


def is_number(value: Any) -> bool:
    """Whether a value can be a metric: a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _steps(value: Any) -> int:
    """Convert a count of steps.

    Raises:
        ValueError: If the value is no number, or too large for a database.
    """
    if not is_number(value) or abs(value) > _MOST_STEPS:
        raise ValueError(f"{value!r} is not a count of steps")
    return int(value)


def mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among the values; None without any."""
    numbers = [float(value) for value in values if is_number(value)]
    return sum(numbers) / len(numbers) if numbers else None


class StepRounds:
    """Groups the learners' `step` entries into rounds, in which each learner reports at most once.

    A round ends when all learners of the previous round have reported, or when one reports again, so a slow learner
    does not block it.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._last: dict[str, Entry] = {}
        self._before: set[str] = set()
        self._round: dict[str, Entry] = {}

    def restart(self, steps: Mapping[str, int]) -> None:
        """Handle a `start` or `resume`: drop the open round, and reset each learner's steps.

        Args:
            steps: Steps of each learner in the checkpoint.
        """
        self._round, self._last, self._before = {}, {}, set()
        self._steps = {name: int(step) for name, step in steps.items() if is_number(step)}

    def feed(self, entry: Entry) -> list[Entry]:
        """Add a `step` entry; returns the rounds that it ends.

        Raises:
            KeyError: If it names no learner.
            ValueError: If its epoch or its elapsed time is no number.
        """
        learner = entry["learner"]
        if not is_number(entry.get("epoch", 0.0)) or not is_number(entry.get("elapsed", 0.0)):
            raise ValueError("its epoch or its elapsed time is no number")
        done = self.flush() if learner in self._round else []
        self._round[learner] = entry | {"throughput": self._rate(learner, entry)}
        self._steps[learner] = _steps(entry["step"])
        if self._before and self._before <= set(self._round):
            done += self.flush()
        return done

    def flush(self) -> list[Entry]:
        """End the open round, if there is one."""
        if not self._round:
            return []
        entries = list(self._round.values())
        self._before, self._round = set(self._round), {}
        rates = [entry["throughput"] for entry in entries if entry["throughput"] is not None]
        return [
            {
                **entries[-1],
                **{field: mean(entry.get(field) for entry in entries) for field in _MEAN_FIELDS},
                "step": sum(self._steps.values()),
                "epoch": max(entry.get("epoch", 0.0) for entry in entries),
                "elapsed": max(float(entry.get("elapsed", 0.0)) for entry in entries),
                "throughput": sum(rates) if rates else None,
                "learners": len(entries),
            }
        ]

    def _rate(self, learner: str, entry: Entry) -> float | None:
        """Seconds of audio per second since the learner's last entry."""
        before, self._last[learner] = self._last.get(learner), entry
        needed = ("elapsed", "audio_seconds")
        if before is None or not all(is_number(logged.get(name)) for logged in (before, entry) for name in needed):
            return None
        seconds = entry["elapsed"] - before["elapsed"]
        audio = entry["audio_seconds"] - before["audio_seconds"]
        return audio / seconds if seconds > 0 and audio >= 0 else None


class Translator:
    """Turns journal entries, in order, into points; deterministic.

    Args:
        learners: Whether there are points of single learners and nodes.
    """

    def __init__(self, learners: bool = True) -> None:
        self.learners = learners
        self.highest: dict[str, MetricPoint] = {}
        """By metric, the point that MLflow takes for the last one: highest step, then latest time."""
        self.last: dict[str, MetricPoint] = {}
        """By metric, the most recent point."""
        self.latest_ms = 0
        """Time of the latest point."""
        self._rounds = StepRounds()
        self._offset_ms = 0
        self._floor_ms: int | None = None
        self._step = 0

    def feed(self, entry: Entry) -> list[MetricPoint]:
        """The points of one entry; none if it is damaged or of another version."""
        try:
            return [self._placed(point) for point in self._translated(entry)]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            # if raised, no later entry would ever reach MLflow
            _log.warning("a line of the journal gives no metrics (%s: %s)", type(error).__name__, error)
            return []

    def _translated(self, entry: Entry) -> list[MetricPoint]:
        kind = entry["kind"]
        if kind not in ("start", "resume"):
            return self._points_of(kind, entry, self._time(entry))
        points = self._open_round(self.latest_ms)
        self._restart(entry)
        return points

    def _placed(self, point: MetricPoint) -> MetricPoint:
        """Make a point later than the previous one of its metric, and remember it."""
        before = self.last.get(point.name)
        if before is not None and point.at_ms <= before.at_ms:
            point = point._replace(at_ms=before.at_ms + 1)
        self.latest_ms = max(self.latest_ms, point.at_ms)
        self.last[point.name] = point
        best = self.highest.get(point.name)
        if best is None or _order(point) >= _order(best):
            self.highest[point.name] = point
        return point

    def _points_of(self, kind: str, entry: Entry, at_ms: int) -> list[MetricPoint]:
        if kind == "step":
            joined = self._rounds.feed(entry)
            return self._learner(entry, at_ms) + [
                point for completed in joined for point in self._round(completed, at_ms)
            ]
        if kind in ("valid", "end", "epoch"):
            return self._open_round(at_ms) + self._milestone(entry, at_ms)
        if kind == "system":
            return self._system(entry, at_ms)
        return []

    def _open_round(self, at_ms: int) -> list[MetricPoint]:
        return [point for joined in self._rounds.flush() for point in self._round(joined, at_ms)]

    def _restart(self, entry: Entry) -> None:
        steps = entry.get("steps")
        self._rounds.restart(steps if isinstance(steps, dict) else {})
        self._step = _steps(entry.get("step", 0))
        # the millisecond between is reserved for closing points of an earlier session
        self._floor_ms = self.latest_ms + 2 if self.latest_ms else None

    def _time(self, entry: Entry) -> int:
        elapsed: Any = entry.get("elapsed")
        if not is_number(elapsed) or not 0.0 <= float(elapsed) < _LONGEST_S:
            return self.latest_ms
        own = int(1000 * float(elapsed))
        if self._floor_ms is not None:  # first entry after a restart: shift it and all later ones
            self._offset_ms = max(self._offset_ms, self._floor_ms - own)
            self._floor_ms = None
        at_ms = own + self._offset_ms
        self.latest_ms = max(self.latest_ms, at_ms)
        return at_ms

    def _learner(self, entry: Entry, at_ms: int) -> list[MetricPoint]:
        return self._points_of_one(str(entry["learner"]), entry, _LEARNER_FIELDS, at_ms, _steps(entry["step"]))

    def _system(self, entry: Entry, at_ms: int) -> list[MetricPoint]:
        """Points of a machine, with the elapsed seconds as steps."""
        prefix, step = f"{_SYSTEM}node-{entry.get('node')}/", at_ms // 1000
        named = {name: entry.get(field) for field, name in _SYSTEM_FIELDS.items()}
        gpus = entry.get("gpus")
        for gpu in gpus if isinstance(gpus, list) else []:
            if isinstance(gpu, dict) and is_number(gpu.get("gpu")):
                named |= {f"gpu_{gpu['gpu']:.0f}_{name}": gpu.get(field) for field, name in _GPU_FIELDS.items()}
        return self._points(named, list(named), at_ms, step, prefix)

    def _round(self, joined: Entry, at_ms: int) -> list[MetricPoint]:
        self._step = max(self._step, int(joined["step"]))
        return self._points_of_all(joined, _GLOBAL_FIELDS, at_ms, int(joined["step"]))

    def _milestone(self, entry: Entry, at_ms: int) -> list[MetricPoint]:
        self._step = step = max(self._step, _steps(entry.get("step", 0)))
        if entry["kind"] == "end":
            names = [name for name in entry if name.startswith("valid_")]
            return self._points(entry, names, at_ms, step, _FINAL)
        if entry["kind"] == "epoch":
            return self._points_of_all(entry, ("repeated",), at_ms, step)
        names = [name for name in entry if name not in ("kind", "step", "epochs")]
        points = self._points_of_all(entry, names, at_ms, step)
        replicas = entry.get("replicas")
        for node, value in replicas.items() if isinstance(replicas, dict) else ():
            points += self._points_of_one(str(node), {"valid_loss": value}, ("valid_loss",), at_ms, step)
        return points

    def _points_of_all(
        self, entry: Mapping[str, Any], names: Iterable[str], at_ms: int, step: int
    ) -> list[MetricPoint]:
        """Points of the training as a whole, in their folders."""
        return [
            point for name in names for point in self._points(entry, [name], at_ms, step, _FOLDERS.get(name, _TRAINING))
        ]

    def _points_of_one(
        self, name: str, entry: Mapping[str, Any], fields: Iterable[str], at_ms: int, step: int
    ) -> list[MetricPoint]:
        """Points of one learner or node; none if they are left out."""
        if not self.learners:
            return []
        named = {f"{field}.{name}": entry.get(field) for field in fields}
        return self._points(named, named, at_ms, step, _LEARNERS)

    def _points(
        self, entry: Mapping[str, Any], names: Iterable[str], at_ms: int, step: int, prefix: str = ""
    ) -> list[MetricPoint]:
        return [
            MetricPoint(_metric_name(prefix + name), float(entry[name]), at_ms, step)
            for name in names
            if is_number(entry.get(name))
        ]


def _metric_name(text: str) -> str:
    """A name that MLflow allows: it rejects a whole batch because of one invalid name."""
    name = re.sub(r"[^\w\-. :/]", "_", text, flags=re.ASCII)[:_LONGEST_NAME]
    # it also rejects names that are no normalized relative paths: a//b, ../a, a/
    return posixpath.normpath("/" + name).strip("/") or "_"


def _order(point: MetricPoint) -> tuple[int, int, float]:
    """MLflow's order of points, which determines the last value."""
    return point.step, point.at_ms, point.value


def closing_points(sent: Translator, valid: Iterable[Entry]) -> list[MetricPoint]:
    """Points that correct the last value of metrics for which a voided entry has the highest step.

    Args:
        sent: Translator that has processed the whole journal, including voided entries.
        valid: The valid entries (`training.coordinator.journal.read_journal`).
    """
    right = Translator(sent.learners)
    for entry in valid:
        right.feed(entry)
    points = []
    for name, point in right.last.items():
        if name.startswith(_SYSTEM):
            continue  # entries of machines are never voided
        shown = sent.highest.get(name, point)
        if (shown.step, shown.value) != (point.step, point.value):
            # later than all points sent, including closing points of an earlier session
            points.append(MetricPoint(name, point.value, sent.latest_ms + 1, max(shown.step, point.step)))
    return points
