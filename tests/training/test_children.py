"""Child processes: their log, their exit reason, their descendants."""

import subprocess
import sys

from support import wait_until

from training.processes.children import Child, children

SAY = "import sys; print(sys.argv[1])"
REASON = "from training.processes.exit_reason import leave_reason; leave_reason('no room'); print('more')"


def python(code, *words):
    return [sys.executable, "-c", code, *words]


def test_output_is_appended_and_tail_starts_at_the_last_start(tmp_path):
    log = tmp_path / "new" / "child.log"
    for word in ("first", "second"):
        child = Child(python(SAY, word), log)
        assert child.wait(240) == 0
        assert child.tail() == word
    assert log.read_text() == "first\nsecond\n"
    assert child.reason() == ""


def test_exit_reason_precedes_the_log_and_is_cleared_at_restart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the child imports this Starling from anywhere
    child = Child(python(REASON), tmp_path / "log", note=tmp_path / "note")
    child.wait(240)
    assert (child.reason(), child.tail()) == ("no room", "no room")
    child = Child(python(SAY, "well"), tmp_path / "log", note=tmp_path / "note")
    child.wait(240)
    assert (child.reason(), child.tail()) == ("", "well")


def test_a_child_has_this_process_s_environment_and_its_own_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = "import os; print(os.environ['OURS'], os.environ['MORE'], os.environ['PYTHONPATH'].endswith(':/elsewhere'))"
    child = Child(python(code), tmp_path / "log", {"MORE": "2"})
    child.wait(240)
    assert child.tail() == "1 2 True"


def test_ended_children_are_listed_until_they_are_waited_for():
    parent = f"import subprocess, sys; subprocess.Popen({python('input()')!r}); print(1, flush=True); input()"
    before = set(children())
    with subprocess.Popen(python(parent), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert set(children()) - before == {child.pid}
        (grandchild,) = children(child.pid)
        assert set(children(all_generations=True)) - before == {child.pid, grandchild}
        child.stdin.close()
        wait_until(lambda: not children(child.pid))
        assert child.pid in children()
        child.wait()
        assert (set(children()) - before, children(child.pid)) == (set(), [])
