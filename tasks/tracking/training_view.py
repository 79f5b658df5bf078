"""State of a running training, derived from its journal: learners, speed, epochs, nodes that joined and left.

    view = TrainingView()
    for entry in tail.new_entries():
        view.feed(entry)
    view.to_dict()

Reading may start anywhere in the journal; earlier information is then missing.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.figures import clock, percent
from tasks.tracking.metrics import Entry, is_number, mean

_RECENT = 20
"""Journal lines of a learner over which its speed is measured."""
_EVENTS = 100
"""Latest events that a view keeps: a reader that looks rarely, on a busy machine, misses none of a short training."""
DEFICIT = 0.8
"""Exchanges per step below which averaging does not keep up with training."""
_FIGURES = ("loss", "lr", "staleness", "exchange_s", "exchanges_per_step", "distance", "failed")


@dataclass
class LearnerView:
    """State of a learner at its last journal line."""

    name: str
    """`node.rank`."""
    step: int = 0
    loss: float | None = None
    lr: float | None = None
    staleness: float | None = None
    """Own steps between the weights that were averaged and the update that uses the average; at least 1."""
    exchange_s: float | None = None
    exchanges_per_step: float | None = None
    """Successful exchanges per step; below 1, averaging does not keep up."""
    distance: float | None = None
    failed: int | None = None
    """Number of failed exchanges."""
    recent: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Elapsed seconds, steps and seconds of audio of the last lines."""

    @property
    def node(self) -> int:
        """Its node's number."""
        number = self.name.partition(".")[0]
        return int(number) if number.isdigit() else 0

    def feed(self, entry: Entry) -> None:
        """Process a `step` line."""
        self.step = int(entry.get("step", 0))
        for name in _FIGURES:
            setattr(self, name, entry[name] if is_number(entry.get(name)) else None)
        if not is_number(entry.get("elapsed")):
            return
        elapsed, audio = float(entry["elapsed"]), entry.get("audio_seconds")
        if self.recent and (elapsed < self.recent[-1][0] or self.step < self.recent[-1][1]):
            self.recent.clear()  # a resume went back
        self.recent.append((elapsed, self.step, float(audio) if is_number(audio) and audio else 0.0))

    def _rate(self, column: int) -> float | None:
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        gained = self.recent[-1][column] - self.recent[0][column]
        return gained / (self.recent[-1][0] - self.recent[0][0]) if gained >= 0 else None

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of training; None before the second line."""
        return self._rate(1)

    @property
    def audio_per_s(self) -> float | None:
        """Seconds of audio per second."""
        return self._rate(2)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        fields = ("step", *_FIGURES, "steps_per_s", "audio_per_s")
        return {"learner": self.name, "node": self.node, **{name: getattr(self, name) for name in fields}}


def training_line(figures: Mapping[str, Any]) -> str:
    """State of a training in one line: the same in the terminal, in Prefect, and first in `starling top`.

    Args:
        figures: `epoch`, `epochs`, `loss`, `valid` (the last validation, or None), `audio_per_s`, `eta_s` and `ended`;
            what is None is left out.
    """
    parts = [f"epoch {figures['epoch']:.2f}".removesuffix(".00") + f" of {figures['epochs']:g}"]
    parts.append("no finite loss" if figures["loss"] is None else f"loss {figures['loss']:.3f}")
    if figures["valid"] is not None:
        parts.append(validation_text(figures["valid"]))
    if figures["audio_per_s"] is not None:
        parts.append(f"{figures['audio_per_s']:.0f} × real time")
    if figures["ended"]:
        parts.append("ended")
    elif figures["eta_s"] is not None:
        parts.append(f"{clock(figures['eta_s'])} left")
    return ", ".join(parts)


def validation_text(entry: Entry) -> str:
    """Figures of a validation; models of tied states have no WER."""
    loss = entry.get("valid_loss")
    text = "no finite validation loss" if loss is None else f"validation loss {loss:.3f}"
    for name, label in (("valid_wer", "WER"), ("valid_frame_accuracy", "frame accuracy")):
        if entry.get(name) is not None:
            text += f", {label} {percent(entry[name], 1)}"
    return text


class TrainingView:
    """State of a training; `feed` processes the journal's lines in order."""

    def __init__(self) -> None:
        self.learners: dict[str, LearnerView] = {}
        self.systems: dict[int, Entry] = {}
        """Last figures of each node's machine."""
        self.nodes: set[int] | None = None
        """Nodes in the ring; None before the journal lists any."""
        self.progress = 0.0
        self.epochs = 0.0
        self.elapsed = 0.0
        self.valid: Entry | None = None
        """The last validation of the average."""
        self.ended: Entry | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._pace: deque[tuple[float, float]] = deque(maxlen=200)

    def feed(self, entry: Entry) -> None:
        """Process a line; invalid lines are ignored."""
        handler = {
            "start": self._begin,
            "resume": self._begin,
            "step": self._step,
            "view": self._view,
            "valid": self._valid,
            "epoch": self._epoch,
            "system": self._system,
            "bad": self._bad,
            "end": self._end,
        }.get(entry["kind"])
        if handler is None:
            return
        try:
            if is_number(entry.get("elapsed")):
                self.elapsed = max(self.elapsed, float(entry["elapsed"]))
            handler(entry)
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # of another version, or damaged

    def _tell(self, text: str) -> None:
        self.events.append({"elapsed": round(self.elapsed, 1), "text": text})

    def _begin(self, entry: Entry) -> None:
        resumed = entry["kind"] == "resume"
        self.learners, self.systems, self.nodes, self.ended, self.valid = {}, {}, None, None, None
        self.progress = float(entry.get("epoch", 0.0)) if resumed else 0.0
        self.elapsed = float(entry.get("elapsed", 0.0))
        self._pace.clear()
        self._tell(f"resumed from {entry.get('checkpoint', 'a checkpoint')}" if resumed else "training started")

    def _step(self, entry: Entry) -> None:
        name = str(entry.get("learner", "0.0"))
        self.learners.setdefault(name, LearnerView(name)).feed(entry)
        self.epochs = float(entry.get("epochs", self.epochs))
        # the learners' progress differs slightly: never go back
        self.progress = max(self.progress, float(entry["epoch"]))
        self._pace.append((self.elapsed, self.progress))

    def _view(self, entry: Entry) -> None:
        self.nodes = {int(node) for node in entry["nodes"]}
        for node in entry.get("joined", []):
            self._tell(f"node {node} joined")
        for node, why in dict(entry.get("left", {})).items():
            self._tell(f"node {node} left: {why}")

    def _valid(self, entry: Entry) -> None:
        self.valid = entry
        self.epochs = float(entry.get("epochs", self.epochs))
        self._tell(f"epoch {entry['epoch']}: {validation_text(entry)}")

    def _epoch(self, entry: Entry) -> None:
        repeated = f", {entry['repeated']} of them repeated after a node was lost" if entry.get("repeated") else ""
        self._tell(f"epoch {entry['epoch']} ended: {entry['utterances']} utterances{repeated}")

    def _system(self, entry: Entry) -> None:
        self.systems[int(entry["node"])] = entry

    def _bad(self, entry: Entry) -> None:
        self._tell(f"learner {entry.get('learner', '?')}: {entry['what']}")

    def _end(self, entry: Entry) -> None:
        self.ended = entry
        self._tell("training has ended")

    # --- queries

    @property
    def present(self) -> list[LearnerView]:
        """Learners of the nodes in the ring, sorted."""
        nodes = self.nodes
        learners = [learner for learner in self.learners.values() if nodes is None or learner.node in nodes]
        return sorted(
            learners, key=lambda learner: [int(part) if part.isdigit() else 0 for part in learner.name.split(".")]
        )

    @property
    def loss(self) -> float | None:
        """Mean loss of the present learners."""
        return mean(learner.loss for learner in self.present)

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of all present learners together."""
        rates = [rate for learner in self.present if (rate := learner.steps_per_s) is not None]
        return sum(rates) if rates else None

    @property
    def audio_per_s(self) -> float | None:
        """Seconds of audio per second of all present learners together."""
        rates = [rate for learner in self.present if (rate := learner.audio_per_s) is not None]
        return sum(rates) if rates else None

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds of training at the current speed; None while it is unknown."""
        if self.ended is not None or len(self._pace) < 2:
            return None
        (begin, first), (end, last) = self._pace[0], self._pace[-1]
        if end <= begin or last <= first:
            return None
        return max(0.0, self.epochs - last) * (end - begin) / (last - first)

    def figures(self) -> dict[str, Any]:
        """The figures of `training_line`, of the training as a whole."""
        return {
            "epoch": self.progress,
            "epochs": self.epochs,
            "loss": self.loss,
            "valid": self.valid,
            "audio_per_s": self.audio_per_s,
            "eta_s": self.eta_s,
            "ended": self.ended is not None,
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        learners = []
        for learner in self.present:
            system = self.systems.get(learner.node, {})
            learners.append({**learner.to_dict(), "host": system.get("host")})
        hidden = ("kind", "elapsed")
        valid = None
        if self.valid is not None:
            names = ("epoch", "train_loss", "valid_loss", "valid_wer", "valid_frame_accuracy")
            valid = {name: self.valid.get(name) for name in names}
        return self.figures() | {
            "elapsed": self.elapsed,
            "steps_per_s": self.steps_per_s,
            "nodes": None if self.nodes is None else sorted(self.nodes),
            "learners": learners,
            "systems": [
                {name: value for name, value in entry.items() if name not in hidden}
                for _, entry in sorted(self.systems.items())
            ],
            "valid": valid,
            "events": list(self.events),
        }
