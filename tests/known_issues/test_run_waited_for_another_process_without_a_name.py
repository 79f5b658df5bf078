"""A run that looked at a lock just after another had taken it said that it waits for "another process"."""

import fcntl
import time

from storage.locks import file_lock


def test_owner_is_named_once_it_has_written_its_name(tmp_path, monkeypatch):
    path, said = tmp_path / "x.lock", []
    with path.open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        looks = 0

        def sleep(_):
            nonlocal looks
            looks += 1
            if looks == 2:
                owner.write("run a")
                owner.flush()
            if looks == 4:
                fcntl.flock(owner, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        with file_lock(path, 60.0, on_wait=said.append):
            pass
    assert said == ["run a", "run a"]
