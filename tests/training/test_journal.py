"""The journal: whole lines only; torn and void lines are skipped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.coordinator.journal import Journal, JournalTail, parse_lines, read_journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "work" / "journal.jsonl"


def steps_of(path):
    return [entry["step"] for entry in read_journal(path) if entry["kind"] == "step"]


def write_steps(journal, *steps):
    for step in steps:
        journal.write("step", step=step, loss=1.0 / step)


def test_entries_are_read_as_written(path):
    journal = Journal(path)
    journal.write("start", step=0, run="r")
    journal.write("step", step=1, loss=2.5, note="naïve – ✓")
    journal.close()
    assert read_journal(path) == [
        {"kind": "start", "step": 0, "run": "r"},
        {"kind": "step", "step": 1, "loss": 2.5, "note": "naïve – ✓"},
    ]
    assert read_journal(path.with_name("absent")) == []


def test_torn_line_loses_no_other_line(path):
    journal = Journal(path)
    write_steps(journal, 1, 2)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')
    again = Journal(path)
    write_steps(again, 3)
    again.close()
    assert steps_of(path) == [1, 2, 3]


@settings(max_examples=40)
@given(line=st.integers(0, 8), more=st.integers(-3, 3) | st.integers(0, 60))
def test_journal_truncated_anywhere_keeps_its_complete_lines(tmp_path_factory, line, more):
    """Anywhere, and more often close to the end of a line."""
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    journal = Journal(path)
    write_steps(journal, *range(1, 9))
    journal.close()
    data = path.read_bytes()
    data = data[: max(0, sum(map(len, data.splitlines(keepends=True)[:line])) + more)]
    path.write_bytes(data)
    again = Journal(path)
    write_steps(again, 99)
    again.close()
    whole = data.count(b"\n")
    # a cut just before the line feed leaves a whole entry, too
    assert steps_of(path) in ([*range(1, whole + 1), 99], [*range(1, whole + 2), 99])


def test_resume_voids_later_entries_of_the_lost_process(path):
    journal = Journal(path)
    journal.write("start", step=0)
    write_steps(journal, 1, 2, 3, 4, 5)
    journal.write("valid", step=5, epoch=1, valid_loss=9.0)
    journal.write("resume", step=3, epoch=0, cursor=3)
    write_steps(journal, 4, 5)
    journal.write("valid", step=5, epoch=1, valid_loss=1.0)
    journal.close()
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert [entry["valid_loss"] for entry in read_journal(path) if entry["kind"] == "valid"] == [1.0]


def test_each_resume_voids_later_entries(path):
    journal = Journal(path)
    write_steps(journal, 1, 2, 3, 4)
    journal.write("resume", step=4, epoch=0)
    write_steps(journal, 5, 6)
    journal.write("resume", step=2, epoch=0)
    write_steps(journal, 3)
    journal.close()
    assert steps_of(path) == [1, 2, 3]
    assert [entry["step"] for entry in read_journal(path) if entry["kind"] == "resume"] == [2]


def learner_steps(path):
    return [(entry["learner"], entry["step"]) for entry in read_journal(path) if entry["kind"] == "step"]


def write_learners(journal, **last):
    """Steps 1 to `last` of each learner, in turns."""
    for step in range(1, max(last.values()) + 1):
        for learner, end in last.items():
            if step <= end:
                journal.write("step", learner=learner.replace("_", ".").strip("n"), step=step)


def test_a_resume_voids_each_learners_own_steps(path):
    """Learners are at different steps in a checkpoint, and one that it does not know starts at zero."""
    journal = Journal(path)
    journal.write("start", step=0)
    write_learners(journal, n0_0=3, n1_0=6, n2_0=2)
    journal.write("bad", learner="1.0", step=5, what="no number")
    journal.write("bad", learner="0.0", step=2, what="no number")
    journal.write("resume", step=6, epoch=0, steps={"0.0": 2, "1.0": 4})
    journal.close()
    assert learner_steps(path) == [("0.0", 1), ("1.0", 1), ("0.0", 2), ("1.0", 2), ("1.0", 3), ("1.0", 4)]
    assert [entry["learner"] for entry in read_journal(path) if entry["kind"] == "bad"] == ["0.0"]


def test_a_resume_voids_epochs_and_views_beyond_it(path):
    """Steps over all learners count for views, epochs for what is reported once an epoch."""
    journal = Journal(path)
    journal.write("view", step=0, number=1, nodes=[0, 1])
    for epoch in (1, 2, 3):
        journal.write("epoch", epoch=epoch, step=10 * epoch, utterances=48)
        journal.write("valid", epoch=epoch, step=10 * epoch, valid_loss=1.0 / epoch)
    journal.write("view", step=25, number=2, nodes=[0])
    # every step of epoch 2 is in the checkpoint, but its last one closed the epoch only afterwards
    journal.write("resume", step=20, epoch=1, steps={"0.0": 10, "1.0": 10})
    journal.close()
    left = [(entry["kind"], entry.get("epoch", entry.get("number"))) for entry in read_journal(path)]
    assert left == [("view", 1), ("epoch", 1), ("valid", 1), ("resume", 1)]


def test_start_voids_all_earlier_entries(path):
    journal = Journal(path)
    write_learners(journal, n0_0=2, n0_1=2)
    journal.write("end", step=4)
    journal.write("start", step=0)
    write_learners(journal, n0_0=1)
    journal.close()
    assert [entry["kind"] for entry in read_journal(path)] == ["start", "step"]


def test_tail_returns_every_entry_once_and_waits_for_complete_lines(path):
    tail = JournalTail(path)
    assert tail.new_entries() == []
    journal = Journal(path)
    write_steps(journal, 1, 2)
    assert [entry["step"] for entry in tail.new_entries()] == [1, 2]
    with path.open("ab") as file:
        file.write('{"kind": "step", "step": 3, "note": "ü'.encode()[:-1])  # cut within a character
    assert tail.new_entries() == []
    with path.open("ab") as file:
        file.write("ü".encode()[-1:] + b'"}\n')
    assert [(entry["step"], entry["note"]) for entry in tail.new_entries()] == [(3, "ü")]
    assert tail.new_entries() == []
    journal.close()


@pytest.mark.parametrize("as_long", [0.3, 1, 3])
@pytest.mark.parametrize("same_file", [True, False])
def test_tail_restarts_at_the_first_line_of_a_new_journal(path, as_long, same_file):
    tail, journal = JournalTail(path), Journal(path)
    write_steps(journal, *range(1, 31))
    assert len(tail.new_entries()) == 30
    again = path.with_name("again")
    other = Journal(again)
    write_steps(other, *range(101, 101 + int(30 * as_long)))
    other.close()
    if same_file:
        path.write_bytes(again.read_bytes()[: path.stat().st_size - 1])
    else:
        again.replace(path)
    first = [entry["step"] for entry in tail.new_entries()]
    assert first == [*range(101, 101 + len(first))]
    assert len(first) == int(30 * as_long) if not same_file else 0 < len(first) < 30
    journal.close()
    again = Journal(path)
    write_steps(again, 200)
    assert [entry["step"] for entry in tail.new_entries()] == [200]
    assert tail.new_entries() == []
    again.close()


def test_lines_that_are_not_entries_are_skipped():
    lines = ["", "null", "[1]", '{"step": 1}', "{", '{"kind": "step"}']
    assert list(parse_lines(lines)) == [{"kind": "step"}]
