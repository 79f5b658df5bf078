"""Decides which epochs can be evaluated, that is, whose replicas are complete."""

from training.coordinator.epochs import Totals
from training.coordinator.ledger import Ledger
from training.coordinator.messages import JsonObject, ReadyEpoch

LATE_S = 30.0
"""How long to wait for the other nodes' replicas after the first."""
_NAMED = ("epoch", "loss", "wer", "replicas", "unreadable")
"""Fields of an evaluation's result that the journal has in any case."""


class Evaluations:
    """Tracks the replicas that nodes write at the end of each epoch; epochs are numbered from 1 here.

    Args:
        ledger: The state.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._first: dict[int, float] = {}

    def last(self) -> int:
        """The current epoch, or the previous one if none of its rows was trained."""
        closed = self.ledger.values.closed
        partial = self.ledger.epochs.get(closed)
        return closed + bool(partial is not None and partial.count)

    def _open(self) -> list[int]:
        """Epochs that are over and not evaluated: closed ones, and the one in which a limit was reached."""
        values, done = self.ledger.values, {entry["epoch"] for entry in self.ledger.books.history}
        last = values.last if values.finish == "limit" else values.closed
        return [number for number in range(1, last + 1) if number not in done]

    def _awaited(self, number: int) -> set[int]:
        """Nodes whose replica is still missing."""
        states = self.ledger.states
        names = [name for name in self.ledger.books.awaited.get(str(number), states) if name in states]
        delivered = self.ledger.books.snapshots.get(str(number), [])
        if not names and not delivered:
            names = [name for name, state in states.items() if state.ready]
        return {states[name].member.node for name in names} - set(delivered)

    def _at_hand(self, number: int) -> bool:
        """Whether the nodes' current replicas are those of the epoch's end, or of when a limit was reached."""
        values = self.ledger.values
        return number >= values.closed or (values.finish == "limit" and number == values.last)

    def pending(self) -> list[int]:
        """Epochs that are over, not evaluated, and whose replicas were or will be written.

        Once a limit is reached, no node comes back, so nodes that have left are not waited for.
        """
        stored, over = self.ledger.books.snapshots, self.ledger.values.finish == "limit"
        return [
            number
            for number in self._open()
            if stored.get(str(number)) or (self._at_hand(number) and not (over and not self._awaited(number)))
        ]

    def lost(self) -> bool:
        """Whether the last epoch was not evaluated and no node has written its replica."""
        last = self.ledger.total
        return last in self._open() and not self.ledger.books.snapshots.get(str(last))

    def wanted(self, node: int) -> int | None:
        """The newest epoch whose replica a node should write now."""
        # nodes still have their replica of the last epoch's end, not of earlier ones
        newest = [number for number in self._open() if self._at_hand(number)]
        return next((number for number in reversed(newest) if node in self._awaited(number)), None)

    def ready(self, now: float) -> list[ReadyEpoch]:
        """Epochs to evaluate, oldest first."""
        epochs = []
        for number in self._open():
            nodes = self.ledger.books.snapshots.get(str(number), [])
            if not nodes:
                continue
            first = self._first.setdefault(number, now)
            if not self._awaited(number) or now - first > LATE_S:
                epochs.append(ReadyEpoch(epoch=number, nodes=tuple(sorted(nodes))))
        return epochs

    def journal_line(self, number: int, result: JsonObject) -> JsonObject:
        """The journal's `valid` entry for an evaluation.

        Args:
            number: The epoch.
            result: `loss`, `wer`, `replicas` (each node's loss), and `unreadable` if utterances were lost. Further
                figures of the objective, such as `frame_accuracy`, are copied with the prefix `valid_`.
        """
        ledger = self.ledger
        past = [part.totals for n, part in sorted(ledger.closed.items()) if n < number]
        closed = ledger.closed.get(number - 1)
        if closed is None and number - 1 in ledger.epochs:
            past.append(ledger.epochs[number - 1].totals)
        own = past[-1] if past else Totals()
        return {
            "kind": "valid",
            "epoch": number,
            "epochs": ledger.total,
            "step": closed.step if closed else ledger.totals.steps,
            "train_loss": own.loss_sum / own.tokens if own.tokens else None,
            "valid_loss": result.get("loss"),
            "valid_wer": result.get("wer"),
            "replicas": result.get("replicas", {}),
            "elapsed": closed.elapsed if closed else ledger.values.elapsed,
            "audio_seconds": sum(totals.seconds for totals in past),
            "unalignable": sum(totals.unalignable for totals in past),
            **{f"valid_{name}": value for name, value in result.items() if name not in _NAMED},
        } | ({"valid_unreadable": result["unreadable"]} if result.get("unreadable") else {})
