"""A run killed before its first checkpoint left its steps in the learning curves twice."""

from training.coordinator.journal import Journal, read_journal


def test_second_start_voids_all_earlier_entries(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for _ in range(2):
        journal.write("start", step=0, run="r")
        for step in (1, 2):
            journal.write("step", step=step, loss=1.0)
    journal.close()
    assert [(entry["kind"], entry["step"]) for entry in read_journal(journal.path)] == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
    ]


def test_validation_without_later_checkpoint_is_void(tmp_path):
    """Killed between the end of an epoch and its checkpoint: the resume validates again at the same step."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("valid", step=4, epoch=1, valid_loss=3.0)
    journal.write("valid", step=8, epoch=2, valid_loss=2.0)
    journal.write("resume", step=8, epoch=1, cursor=4)
    journal.write("valid", step=8, epoch=2, valid_loss=2.0)
    journal.close()
    assert [entry["epoch"] for entry in read_journal(journal.path) if entry["kind"] == "valid"] == [1, 2]


def test_end_followed_by_a_resume_is_void(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("end", step=8)
    journal.write("resume", step=8, epoch=2, cursor=0)
    journal.write("end", step=8)
    journal.close()
    assert [entry["kind"] for entry in read_journal(journal.path)] == ["resume", "end"]
