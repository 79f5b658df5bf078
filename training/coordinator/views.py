"""Read-only views of the coordinator: the journal, piece by piece, and the leases of each node."""

from pathlib import Path

from training.coordinator.journal import Position, read_on
from training.coordinator.ledger import Ledger
from training.coordinator.messages import Message


def journal_portion(path: Path, offset: int) -> Message:
    """Complete lines of the journal.

    Args:
        path: The journal.
        offset: Bytes that the onlooker has; below 0, begin near the end. One beyond the end means that the journal was
            begun anew, and gets it from its beginning.

    Returns:
        The lines' `text`, the `offset` where they begin, and the `end` to ask from next.
    """
    position, lines = read_on(path, Position(offset))
    text = lines.decode("utf-8", errors="replace")
    return {"offset": position.offset - len(lines), "end": position.offset, "text": text}


def held(ledger: Ledger, incarnation: str) -> Message:
    """The leases of a node, and the utterances that it has yet to train."""
    leases = [lease for epoch in ledger.epochs.values() for lease in epoch.leases.values()]
    mine = [lease.left for lease in leases if lease.incarnation == incarnation]
    return {"leases": len(mine), "leased": sum(mine)}


def unleased(ledger: Ledger) -> int:
    """Utterances of the epoch under way that nobody has trained or holds."""
    epoch = ledger.epochs.get(ledger.values.closed)
    if epoch is None:
        return 0 if ledger.complete else ledger.size
    return len(epoch) - epoch.count - sum(lease.left for lease in epoch.leases.values())
