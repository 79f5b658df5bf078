"""Watches recognition without transcripts: what servers log is compared with what the model did on its test sets.

A server's log has a line for each utterance (confidence, length, words per second) and for each input that was refused.
The outputs of the stages `decode` and `shard` have the same of the test sets. Whether two distributions differ is told
by the Kolmogorov-Smirnov distance, the largest difference of their distribution functions; how often chance makes it
as large, by a permutation test, which holds for equal values, too. A difference is one only if it is both large and no
chance: with thousands of utterances any difference is significant.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow.entities import Metric
from numpy.typing import NDArray

from recognition.serving.limits import REFUSED_AUDIO
from tasks.config.home import home
from tasks.config.pipeline import MonitorConfig, PipelineConfig
from tasks.dataset.tables import read_table
from tasks.figures import p_value_text
from tasks.orchestration.events import RECOGNITION_CHANGED, emit
from tasks.stages.base import Run
from tasks.stages.decode import DECODE
from tasks.tracking.promotion import load_run
from tasks.tracking.registry import RegistryError, get_version
from tasks.tracking.runs import client, impatient

Values = NDArray[np.float64]
MEASURES = ("confidence", "words_per_second", "seconds")
"""What is compared of each utterance, by its name in the log."""
REJECTED = "rejected"
"""What is compared of each input: 1 if its audio was refused, else 0."""
PERMUTATIONS = 1999
TEST = (
    "two-sample Kolmogorov-Smirnov distance; p-value by a permutation test with {permutations:,} permutations, times "
    "the number of comparisons (Bonferroni)"
)
_DRAWN = 5000
"""Most utterances of a side that are compared: drawn at random from more."""
_FEWEST = 10
"""Of a test set: fewer have no distribution."""
_LOGS = "serve-*.jsonl"
_REQUEST_S = 20
"""Seconds for a request to MLflow."""


@dataclass(frozen=True)
class MeasureComparison:
    """A measure of what was served, and of the test sets."""

    measure: str
    served: int
    """Number of utterances, or of inputs."""
    tested: int
    distance: float
    """Largest difference of the two distribution functions, 0 to 1; of rejected inputs, that of the shares."""
    p_value: float
    """Probability of such a distance by chance, corrected for the number of comparisons."""
    served_middle: float
    """Median; of rejected inputs, their share."""
    tested_middle: float
    changed: bool
    """Whether the distance is large and no chance."""

    @property
    def text(self) -> str:
        """The comparison in words."""
        return (
            f"{self.measure} {self.served_middle:.3g} against {self.tested_middle:.3g} (distance {self.distance:.2f}, "
            f"{p_value_text(self.p_value)})"
        )


@dataclass(frozen=True)
class MonitorReport:
    """What a look at servers' logs has found."""

    model: str
    outcome: str
    """`Changed`, `Unchanged`, `TooFew` (utterances), or `Empty` (no log of this model in the period)."""
    message: str
    version: str = ""
    """The last one that was served."""
    since: str = ""
    until: str = ""
    comparisons: list[MeasureComparison] = field(default_factory=list)
    hours: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each hour: utterances, seconds, mean confidence, words per second, inputs, rejected inputs."""
    unreadable: int = 0
    """Lines of the logs that were left out because they are damaged."""


@dataclass
class _Log:
    """What the logs say of a model in a period."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of utterances."""
    inputs: list[tuple[str, bool]] = field(default_factory=list)
    """Time of each file and stream, and whether its audio was refused."""
    others: set[str] = field(default_factory=set)
    """Other models that they are about."""
    unreadable: int = 0


def compare_distributions(first: Values, second: Values, seed: int = 1) -> tuple[float, float]:
    """The Kolmogorov-Smirnov distance of two samples, and the p-value of a permutation test.

    Args:
        first: Values of a sample [n].
        second: Of the other one [m].
        seed: Of the permutations.
    """
    values = np.concatenate([first, second])
    order = np.argsort(values, kind="stable")
    last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # of equal values
    steps = np.repeat([1 / len(first), -1 / len(second)], [len(first), len(second)])[order]

    def distance(changes: Values) -> float:
        return float(np.abs(np.cumsum(changes)[last]).max())

    found, draw = distance(steps), np.random.default_rng(seed)
    as_large = sum(distance(draw.permutation(steps)) >= found - 1e-12 for _ in range(PERMUTATIONS))
    return found, (1 + as_large) / (1 + PERMUTATIONS)


def compare_served(
    served: dict[str, Values], tested: dict[str, Values], settings: MonitorConfig
) -> list[MeasureComparison]:
    """Compare each measure that both have.

    Args:
        served: Values by measure.
        tested: Likewise.
        settings: What counts as a change.
    """
    draw = np.random.default_rng(1)
    both = [name for name in served if len(served[name]) and len(tested.get(name, ()))]
    made = []
    for name in both:
        ours, theirs = _drawn(served[name], draw), _drawn(tested[name], draw)
        distance, p_value = compare_distributions(ours, theirs)
        p_value = min(1.0, p_value * len(both))
        middle = np.mean if name == REJECTED else np.median
        middles = float(middle(served[name])), float(middle(tested[name]))
        large = distance >= settings.distance
        if name == REJECTED:  # fewer are no reason for concern
            large = middles[0] - middles[1] >= settings.rejected
        sizes = len(served[name]), len(tested[name])
        made.append(
            MeasureComparison(name, *sizes, distance, p_value, *middles, large and p_value < settings.significance)
        )
    return made


def _drawn(sample: Values, draw: np.random.Generator) -> Values:
    """Some of the values, if there are very many."""
    return sample if len(sample) <= _DRAWN else np.asarray(draw.choice(sample, _DRAWN, replace=False))


def tested_values(run: Run) -> dict[str, Values]:
    """Values of a model's test sets, by measure.

    Args:
        run: The run that registered the model.
    """
    output = run.result("decode").output
    rows = [row for name in DECODE.record(run)["sets"] for row in read_table(output, f"{name}.parquet")]
    seconds = np.array([row["duration"] for row in rows], dtype=float)
    words = np.array([len(row["hyp"].split()) for row in rows], dtype=float)
    counts = run.result("shard").record["counts"]
    refused = np.zeros(int(counts["read"]))
    refused[: int(counts["quarantined"])] = 1
    return {
        "confidence": np.array([row["confidence"] for row in rows], dtype=float),
        "words_per_second": words / np.maximum(seconds, 1e-3),
        "seconds": seconds,
        REJECTED: refused,
    }


def monitored(config: PipelineConfig | None, model: str, settings: MonitorConfig | None) -> tuple[str, MonitorConfig]:
    """The model and how it is watched, by parameters or by a configuration.

    Raises:
        RegistryError: Neither names a model.
    """
    name = model or (config.model_name if config is not None else "")
    if not name:
        raise RegistryError("no model given: name it as in the registry, or give a configuration")
    return name, settings or (config.monitor if config is not None else MonitorConfig())


def monitor_model(name: str, settings: MonitorConfig, until: datetime | None = None) -> MonitorReport:
    """Compare what servers of a model have recognized with its test sets; logs the figures, and tells of changes.

    The figures are metrics of the version's MLflow run, an hour of which is a step. A change is the event
    `starling.recognition-changed`.

    Args:
        name: Registered model.
        settings: Logs, period, and what counts as a change.
        until: End of the period; by default now.

    Raises:
        RegistryError: The registry does not have the version that was served, or what it was tested on is gone.
    """
    until = (until or datetime.now(UTC)).astimezone(UTC)
    since = until - timedelta(hours=settings.hours)
    found = _read_logs(log_files(settings), name, since.isoformat(), until.isoformat())
    version = next((str(line["version"]) for line in reversed(found.lines) if line.get("version")), "")
    period = {"since": since.isoformat(timespec="minutes"), "until": until.isoformat(timespec="minutes")}
    about: dict[str, Any] = {"version": version, **period, "hours": _hours(found), "unreadable": found.unreadable}
    if not version:
        text = f"the logs have no utterance of a version of {name} since {period['since']}"
        text += f"; they have some of {', '.join(sorted(found.others))}" if found.others else ""
        missing = [str(path) for path in named_logs(settings) if not path.exists()]
        text += f"; {', '.join(missing)} is not there" if missing else ""
        return MonitorReport(name, "Empty", text, **about)
    lines = [line for line in found.lines if line.get("version") == version]
    if len(lines) < settings.utterances:
        text = f"version {version} of {name} has recognized {len(lines)} utterances since {period['since']}"
        return MonitorReport(name, "TooFew", f"{text}: fewer than {settings.utterances} are not compared", **about)
    api = client()
    registered = get_version(api, name, version)
    served = {measure: np.array([line[measure] for line in lines], dtype=float) for measure in MEASURES}
    served[REJECTED] = np.array([refused for _, refused in found.inputs], dtype=float)
    tested = tested_values(load_run(registered))
    if len(tested["confidence"]) < _FEWEST:
        text = f"the test sets of version {version} of {name} have fewer than {_FEWEST} utterances"
        return MonitorReport(name, "TooFew", text, **about)
    comparisons = compare_served(served, tested, settings)
    _log_figures(api, registered.run_id, comparisons, until)
    return _told(MonitorReport(name, "", "", comparisons=comparisons, **about), len(lines))


def _told(report: MonitorReport, utterances: int) -> MonitorReport:
    """The report with its outcome; a change is an event."""
    changed = [entry for entry in report.comparisons if entry.changed]
    what = f"version {report.version} of {report.model}, {utterances:,} utterances since {report.since}"
    if not changed:
        message = f"{what}: no measure differs from the test sets' as far as `monitor` says"
        return replace(report, outcome="Unchanged", message=message)
    message = f"{what}: not as on the test sets: {'; '.join(entry.text for entry in changed)}"
    payload = {
        **{name: getattr(report, name) for name in ("version", "since", "until")},
        "reason": message,
        "changed": [entry.measure for entry in changed],
        "test": TEST.format(permutations=PERMUTATIONS),
        "comparisons": [asdict(entry) for entry in report.comparisons],
    }
    emit(RECOGNITION_CHANGED, report.model, payload)
    return replace(report, outcome="Changed", message=message)


def _log_figures(
    api: mlflow.MlflowClient, run_id: str, comparisons: Iterable[MeasureComparison], until: datetime
) -> None:
    at_ms, hour = int(1000 * until.timestamp()), int(until.timestamp() // 3600)
    figures: dict[str, float] = {}
    for entry in comparisons:
        place = f"served.{entry.measure}"
        figures |= {f"{place}.distance": entry.distance, f"{place}.p_value": entry.p_value}
        figures |= {f"{place}.middle": entry.served_middle, f"{place}.count": float(entry.served)}
    with impatient(_REQUEST_S):
        api.log_batch(run_id, metrics=[Metric(name, value, at_ms, hour) for name, value in figures.items()])


def named_logs(settings: MonitorConfig) -> list[Path]:
    """Logs and folders of logs, which need not be there."""
    return [Path(given).expanduser() for given in settings.logs or (str(home() / "logs"),)]


def log_files(settings: MonitorConfig) -> list[Path]:
    """The logs that there are, each with those that came before it, oldest first."""
    paths: list[Path] = []
    for place in named_logs(settings):
        paths += sorted(place.glob(_LOGS)) if place.is_dir() else [place] if place.exists() else []
    return [old for path in paths for old in [*sorted(path.parent.glob(f"{path.name}.[0-9]"), reverse=True), path]]


def _read_logs(paths: Sequence[Path], model: str, since: str, until: str) -> _Log:
    """What some logs say of a model between two moments, in the order of time.

    Args:
        paths: The logs.
        model: Name of the model.
        since: In the format of the logs, of which texts are ordered as times are.
        until: Likewise.
    """
    found = _Log()
    for line in _lines(paths):
        if line is None:
            found.unreadable += 1
        elif since <= str(line["time"]) < until:
            if line.get("model") == model:
                _sort_in(found, line)
            else:
                found.others.add(str(line.get("model")))
    found.lines.sort(key=lambda line: str(line["time"]))
    return found


def _lines(paths: Iterable[Path]) -> Iterator[dict[str, Any] | None]:
    """The lines of logs; None for one that is damaged, by a full disk for instance."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for raw in file:
                    yield _parsed(raw)
        except FileNotFoundError:  # renamed meanwhile
            continue


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
        if not isinstance(line, dict) or not isinstance(line.get("time"), str):
            return None
        values = [line[name] for name in MEASURES] if line.get("event") == "segment" else []
        sound = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    except (ValueError, KeyError, RecursionError):
        return None
    return line if sound else None


def _sort_in(found: _Log, line: dict[str, Any]) -> None:
    event, when = line["event"], str(line["time"])
    if event == "segment":
        found.lines.append(line)
    elif event in ("file", "stream"):
        found.inputs.append((when, line.get("end") in REFUSED_AUDIO))
    elif event == "rejected" and line.get("code") in REFUSED_AUDIO:
        found.inputs.append((when, True))


def _hours(found: _Log) -> list[dict[str, Any]]:
    """Figures of each hour that has any."""
    made: dict[str, dict[str, Any]] = {}

    def of(when: str) -> dict[str, Any]:
        empty = {"utterances": 0, "seconds": 0.0, "words": 0, "confidence": 0.0, "inputs": 0, "rejected": 0}
        return made.setdefault(when[:13], {"hour": when[:13], **empty})

    for line in found.lines:
        entry = of(str(line["time"]))
        entry["utterances"] += 1
        for name in ("seconds", "words", "confidence"):
            entry[name] += line.get(name, 0)
    for when, refused in found.inputs:
        entry = of(when)
        entry["inputs"] += 1
        entry["rejected"] += refused
    for entry in made.values():
        entry["confidence"] = round(entry["confidence"] / max(1, entry["utterances"]), 4)
        entry["words_per_second"] = round(entry.pop("words") / max(1e-3, entry["seconds"]), 3)
        entry["seconds"] = round(entry["seconds"], 1)
    return [made[hour] for hour in sorted(made)]
