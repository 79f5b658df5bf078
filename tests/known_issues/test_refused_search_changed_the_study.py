"""A search with another configuration was refused, after it had changed the study's limits and its request to stop."""

import pytest

from tasks.search.study import Studies, StudyError


def test_study_of_another_configuration_stays_as_it_is(tmp_path):
    studies = Studies(f"sqlite:///{tmp_path / 'studies.db'}")
    study = studies.create("digits", {"space": {"lr": [1, 2]}}, {"trials": 2})
    study.ask_to_stop()
    with pytest.raises(StudyError, match="made with another space"):
        studies.create("digits", {"space": {"lr": [1, 2, 3]}}, {"trials": 77})
    assert studies.open("digits").about == {"trials": 2}
    assert study.stopping
    again = studies.create("digits", {"space": {"lr": [1, 2]}}, {"trials": 3})
    assert again.about == studies.open("digits").about == {"trials": 3}
    assert not again.stopping


@pytest.mark.parametrize("content", [b"no database" * 1000, b"SQLite format 3\0" + bytes(4000)])
def test_remedy_for_a_damaged_database_helps(tmp_path, content):
    path = tmp_path / "studies.db"
    path.write_bytes(content)
    with pytest.raises(StudyError, match="or move it away: the next search begins a new one"):
        Studies(f"sqlite:///{path}").names()
    path.rename(tmp_path / "away.db")
    assert not Studies(f"sqlite:///{path}").names()
