"""Read-only views of the coordinator's state: portions of the journal, and the leases of each node."""

from pathlib import Path

from training.coordinator.journal import Position, read_on
from training.coordinator.ledger import Ledger
from training.coordinator.messages import Message


def journal_portion(path: Path, offset: int) -> Message:
    """Read complete lines of the journal.

    Args:
        path: The journal.
        offset: Bytes that the reader already has; negative means near the end. An offset beyond the end means that the
            journal was replaced, and reads from its start.

    Returns:
        The lines' `text`, their `offset`, and the `end`, which is the offset for the next request.
    """
    position, lines = read_on(path, Position(offset))
    text = lines.decode("utf-8", errors="replace")
    return {"offset": position.offset - len(lines), "end": position.offset, "text": text}


def held(ledger: Ledger, incarnation: str) -> Message:
    """Number of a node's leases, and of the leased utterances that it has not trained."""
    leases = [lease for epoch in ledger.epochs.values() for lease in epoch.leases.values()]
    mine = [lease.left for lease in leases if lease.incarnation == incarnation]
    return {"leases": len(mine), "leased": sum(mine)}


def unleased(ledger: Ledger) -> int:
    """Number of utterances of the current epoch that are neither trained nor leased."""
    epoch = ledger.epochs.get(ledger.values.closed)
    if epoch is None:
        return 0 if ledger.complete else ledger.size
    return len(epoch) - epoch.count - sum(lease.left for lease in epoch.leases.values())
