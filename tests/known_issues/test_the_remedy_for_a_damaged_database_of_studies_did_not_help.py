"""A damaged database of studies was to be mended by checking its address and its folder's permissions."""

import pytest

from tasks.search.study import Studies, StudyError


@pytest.mark.parametrize("content", [b"no database" * 1000, b"SQLite format 3\0" + bytes(4000)])
def test_remedy_for_a_damaged_database_helps(tmp_path, content):
    path = tmp_path / "studies.db"
    path.write_bytes(content)
    with pytest.raises(StudyError, match="or move it away: the next search begins a new one"):
        Studies(f"sqlite:///{path}").names()
    path.rename(tmp_path / "away.db")
    assert not Studies(f"sqlite:///{path}").names()
