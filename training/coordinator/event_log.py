"""The coordinator's event log in SQLite: events are committed before they are answered, so a kill loses nothing.

Journal lines go through the same transactions. A line is written to the journal after the commit that contains it. A
coordinator that was killed between the two finds the line in the table `outbox`, and knows from the journal's size at
that commit whether it was written. Lines that cannot be written because the disk is full stay in `outbox`, too.
"""

import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from training.coordinator.journal import Journal
from training.coordinator.ledger import Event
from training.coordinator.messages import JsonObject

FULL_S = 30.0
"""How long the coordinator waits for disk space before it exits."""
RETRY_S = 1.0
_log = logging.getLogger(__name__)
_SCHEMA = """
create table if not exists state (id integer primary key check (id = 0), last integer not null, body text not null);
create table if not exists events (number integer primary key, body text not null);
create table if not exists outbox (number integer primary key, line text not null, offset integer not null);
"""


class EventLog:
    """Stores events, a compacted state that saves replaying all of them, and the journal.

    Args:
        path: The database.
        journal: Local file to which metrics are appended.
    """

    def __init__(self, path: Path, journal: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        # with NORMAL a killed process loses nothing; only a power failure may lose the last commits
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_SCHEMA)
        self.journal = Journal(journal)
        self._behind = True
        """Whether the outbox may contain lines that are not in the journal."""
        self._failure_logged, self._retry_at = False, 0.0
        self._catch_up()

    def clear(self) -> None:
        """Delete everything, for a fresh start; lines that wait for the journal belong to an earlier session."""
        self._behind = False
        self._db.executescript("delete from state; delete from events; delete from outbox;")

    def load(self) -> tuple[JsonObject | None, list[Event]]:
        """The newest state, and the events that follow it."""
        row = self._db.execute("select last, body from state").fetchone()
        last, state = (row[0], json.loads(row[1])) if row else (0, None)
        rows = self._db.execute("select body from events where number > ? order by number", (last,))
        return state, [json.loads(body) for (body,) in rows]

    def commit(self, events: list[Event], lines: list[JsonObject], state: JsonObject | None = None) -> None:
        """Make events and journal lines durable in one transaction.

        Args:
            events: In the order in which they were applied.
            lines: Journal entries, each with its `kind`.
            state: The state after these events, to replace older events; None to keep them.
        """
        if self._behind and time.monotonic() >= self._retry_at:
            self._catch_up()
        if not events and not lines and state is None:
            return
        texts = [json.dumps(line, sort_keys=True) for line in lines]
        self._store(lambda: self._insert(events, texts, state))
        if not self._behind:
            self._write_out(texts)

    def _insert(self, events: list[Event], texts: list[str], state: JsonObject | None) -> None:
        if not self._behind:
            self._db.execute("delete from outbox")
        self._db.executemany("insert into events (body) values (?)", [(json.dumps(event),) for event in events])
        rows = [(text, self.journal.size) for text in texts]
        self._db.executemany("insert into outbox (line, offset) values (?, ?)", rows)
        if state is not None:
            self._compact(state)

    def _store(self, write: Callable[[], None]) -> None:
        """Write in one transaction; waits while the disk is full, and meanwhile the nodes continue on their own."""
        deadline, logged = time.monotonic() + FULL_S, False
        while True:
            try:
                self._db.execute("begin immediate")
                write()
                self._db.execute("commit")
                return
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL or time.monotonic() > deadline:
                    raise
            if not logged:
                _log.error("no disk space for %s: the coordinator waits", self._path)
            logged = True
            time.sleep(RETRY_S)

    def _write_out(self, texts: list[str]) -> None:
        """Append lines to the journal; on an error they stay in the outbox."""
        try:
            self.journal.append(texts)
        except OSError as error:
            self._behind, self._retry_at = True, time.monotonic() + RETRY_S
            if not self._failure_logged:
                _log.error("%s cannot be written, lines stay in the coordinator's log: %s", self.journal.path, error)
            self._failure_logged = True

    def _compact(self, state: JsonObject) -> None:
        last = self._db.execute("select coalesce(max(number), 0) from events").fetchone()[0]
        last = max(last, *(row[0] for row in self._db.execute("select last from state")), 0)
        self._db.execute("insert or replace into state values (0, ?, ?)", (last, json.dumps(state)))
        # the newest event stays, so that numbering continues from it
        self._db.execute("delete from events where number < ?", (last,))

    def _catch_up(self) -> None:
        """Write lines that were committed but not written, after a kill or while the disk was full."""
        rows = self._db.execute("select line, offset from outbox order by number").fetchall()
        self._behind = False
        if rows:
            with self.journal.path.open("rb") as file:
                file.seek(rows[0][1])
                written = Counter(file.read().decode(errors="replace").splitlines())
            missing = [line for line, _ in rows if not _take(written, line)]
            self._write_out(missing)
        # the next commit clears the outbox: nothing can be deleted on a full disk
        if self._failure_logged and not self._behind:
            _log.info("%s can be written again", self.journal.path)
            self._failure_logged = False

    def close(self) -> None:
        """Close both files."""
        if self._behind:
            self._catch_up()
        self._db.close()
        self.journal.close()


def _take(written: Counter[str], line: str) -> bool:
    """Whether a line is among those written; each written line is matched once."""
    was_written = written[line] > 0
    written[line] -= int(was_written)
    return was_written
