"""Read-only views of the coordinator's state: portions of the journal, and the status."""

from pathlib import Path

from training.coordinator.checkpoints import CheckpointRounds
from training.coordinator.journal import Position, read_on
from training.coordinator.ledger import Ledger
from training.coordinator.messages import JournalReply, JsonObject, StatusReply


def journal_portion(path: Path, offset: int) -> JournalReply:
    """Read complete lines of the journal.

    Args:
        path: The journal.
        offset: Bytes that the reader already has; negative means near the end. An offset beyond the end means that the
            journal was replaced, and reads from its start.
    """
    position, lines = read_on(path, Position(offset))
    text = lines.decode("utf-8", errors="replace")
    return JournalReply(offset=position.offset - len(lines), end=position.offset, text=text)


def status(ledger: Ledger, wanted: int, rounds: CheckpointRounds, to_evaluate: int) -> StatusReply:
    """The state of the training.

    Args:
        ledger: The state.
        wanted: Number of nodes of the job.
        rounds: Checkpoint rounds.
        to_evaluate: Number of epochs that are over and not evaluated.
    """
    values = ledger.values
    members = [
        {"node": state.member.node, "ready": state.ready, "step": state.step, "incarnation": name} | _held(ledger, name)
        for name, state in ledger.states.items()
    ]
    names = ("session", "running", "stopping", "finish", "failure", "view", "restored")
    return StatusReply(
        **{name: getattr(values, name) for name in names},
        members=tuple(sorted(members, key=lambda member: int(member["node"]))),
        wanted=wanted,
        pool=_unleased(ledger),
        progress=ledger.progress(),
        totals=_totals(ledger),
        to_evaluate=to_evaluate,
        checkpoint=rounds.current.number if rounds.current else None,
        history=tuple(ledger.books.history),
        result=ledger.books.result,
    )


def _held(ledger: Ledger, incarnation: str) -> JsonObject:
    """Number of a node's leases, and of the leased utterances that it has not trained."""
    leases = [lease for epoch in ledger.epochs.values() for lease in epoch.leases.values()]
    mine = [lease.left for lease in leases if lease.incarnation == incarnation]
    return {"leases": len(mine), "leased": sum(mine)}


def _unleased(ledger: Ledger) -> int:
    """Number of utterances of the current epoch that are neither trained nor leased."""
    epoch = ledger.epochs.get(ledger.values.closed)
    if epoch is None:
        return 0 if ledger.complete else ledger.size
    return len(epoch) - epoch.count - sum(lease.left for lease in epoch.leases.values())


def _totals(ledger: Ledger) -> JsonObject:
    """Counters of the whole training, for display and for its result."""
    totals = ledger.totals
    return {
        "step": totals.steps,
        "epoch": ledger.current,
        "utterances": totals.utterances,
        "audio_seconds": totals.seconds,
        "unalignable": totals.unalignable,
        "skipped": totals.skipped,
        "unreadable": totals.unreadable,
        "repeated": ledger.repeated,
        "elapsed": ledger.values.elapsed,
    }
