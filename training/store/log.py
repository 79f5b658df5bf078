"""The store's log in SQLite: events are in it before anybody hears of them, so that a killed store forgets nothing.

Journal lines go through the same transactions. A line is written to the journal after the commit that holds it; a store
that was killed between the two finds it in `outbox` and, by the journal's size at that commit, whether it was written.
"""

import json
import sqlite3
from pathlib import Path

from training.journal import Journal
from training.store.ledger import Event
from training.store.messages import Message

_SCHEMA = """
create table if not exists state (id integer primary key check (id = 0), last integer not null, body text not null);
create table if not exists events (number integer primary key, body text not null);
create table if not exists outbox (number integer primary key, line text not null, offset integer not null);
"""


class StoreLog:
    """Events, a state that spares replaying all of them, and the journal.

    Args:
        path: The database.
        journal: Local file that metrics are appended to.
    """

    def __init__(self, path: Path, journal: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        # a killed process loses nothing under NORMAL; only a power failure may cost the last commits
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_SCHEMA)
        self.journal = Journal(journal)
        self._finish_outbox()

    def clear(self) -> None:
        """Forget everything, for a fresh start."""
        self._db.executescript("delete from state; delete from events; delete from outbox;")

    def load(self) -> tuple[Message | None, list[Event]]:
        """The newest state, and the events since."""
        row = self._db.execute("select last, body from state").fetchone()
        last, state = (row[0], json.loads(row[1])) if row else (0, None)
        rows = self._db.execute("select body from events where number > ? order by number", (last,))
        return state, [json.loads(body) for (body,) in rows]

    def commit(self, events: list[Event], lines: list[Message], state: Message | None = None) -> None:
        """Make events and journal lines permanent, in one transaction.

        Args:
            events: In the order in which they were applied.
            lines: Journal entries, each with its `kind`.
            state: The state after these events, if older events shall be replaced by it.
        """
        if not events and not lines and state is None:
            return
        size = self.journal.path.stat().st_size
        self._db.execute("begin immediate")
        self._db.execute("delete from outbox")
        self._db.executemany("insert into events (body) values (?)", [(json.dumps(event),) for event in events])
        texts = [json.dumps(line, sort_keys=True) for line in lines]
        self._db.executemany("insert into outbox (line, offset) values (?, ?)", [(text, size) for text in texts])
        if state is not None:
            self._compact(state)
        self._db.execute("commit")
        for line in lines:
            self.journal.write(**line)

    def _compact(self, state: Message) -> None:
        last = self._db.execute("select coalesce(max(number), 0) from events").fetchone()[0]
        last = max(last, *(row[0] for row in self._db.execute("select last from state")), 0)
        self._db.execute("insert or replace into state values (0, ?, ?)", (last, json.dumps(state)))
        # the newest event stays, so that numbers go on from it
        self._db.execute("delete from events where number < ?", (last,))

    def _finish_outbox(self) -> None:
        """Write the lines that a killed store has promised and not written."""
        rows = self._db.execute("select line, offset from outbox order by number").fetchall()
        if not rows:
            return
        with self.journal.path.open("rb") as file:
            file.seek(rows[0][1])
            written = set(file.read().decode(errors="replace").splitlines())
        for line, _ in rows:
            if line not in written:
                self.journal.write(**json.loads(line))
        self._db.execute("delete from outbox")

    def close(self) -> None:
        """Close both files."""
        self._db.close()
        self.journal.close()
