"""A process that a fork server makes is as one of an interpreter of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import FORKED
from support import ROOT, processes_naming, wait_until

SHOW = """
import json, os, signal, sys, threading
print(json.dumps({
    "parent": os.getppid(), "leader": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "folder": os.getcwd(), "environment": dict(os.environ), "umask": os.umask(0),
    "argv": sys.argv, "words": sys.orig_argv[1:], "path": sys.path,
    "signals": [str(signal.getsignal(n)) for n in signal.valid_signals()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}")][:5],
    "threads": threading.active_count(), "main": sorted(globals()),
    "streams": [[f.encoding, f.errors, f.line_buffering, f.fileno()] for f in (sys.stdin, sys.stdout, sys.stderr)],
    "said": sys.stdin.read(),
    "shown": [open(f"/proc/self/{name}", "rb").read().decode() for name in ("cmdline", "environ")],
}))
"""


@pytest.fixture(params=["forked", "plain"])
def python(request, tmp_path):
    """Starts `python -c`, either way."""
    started = []

    def start(code, *words, **options):
        env = os.environ | {"HERE": str(tmp_path)} | (FORKED if request.param == "forked" else {})
        started.append(subprocess.Popen([sys.executable, "-c", code, *words], env=env, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_it_finds_what_an_interpreter_finds(tmp_path):
    command = [sys.executable, "-c", SHOW, "a", "b c", ""]
    env = {**os.environ, "WHERE": "x", "STARLING_TESTS_FORK": ""}
    found = []
    for more in ({}, FORKED):
        options = {"cwd": tmp_path, "env": env | more, "input": "told", "capture_output": True, "text": True}
        done = subprocess.run(command, check=True, start_new_session=True, **options)
        found.append(json.loads(done.stdout))
        one = found[-1]
        assert one["parent"] == os.getpid()
        assert "\0" + "\0".join(one["words"]) + "\0" in one["shown"].pop(0)
        shown = one["shown"].pop().rstrip("\0").split("\0")
        assert dict(entry.split("=", 1) for entry in shown) == env | more
        assert one["environment"].pop("STARLING_TESTS_FORK") == more.get("STARLING_TESTS_FORK", "")
    assert found[0] == found[1]


def test_forks_are_fast():
    """They do not import what their server has imported."""
    code = "import sys; sys.exit(7 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | FORKED).returncode == 7
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('words')", 1, "words\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(5)", 5, ""),
    ],
)
def test_it_ends_as_it_says(python, code, status, said):
    process = python(code, stderr=subprocess.PIPE)
    assert process.communicate(timeout=240)[1].endswith(said)
    assert process.returncode == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)])
def test_signals_end_it(python, number, status):
    process = python(
        "import time; print(1, flush=True); time.sleep(600)", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(240) == status
    process.stdout.close()


PARENT = """
import os, subprocess, sys, time
from training.processes import end_with_parent
code = "import sys, time; from training.processes import end_with_parent; end_with_parent(int(sys.argv[1]));"
code += "print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_of_its_own_ends_with_it(python, tmp_path):
    process = python(PARENT, stdout=subprocess.PIPE, cwd=ROOT)
    child = int(process.stdout.readline())
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(process.pid)
    assert {process.pid, child} <= set(processes_naming(str(tmp_path)))
    process.kill()
    process.wait(240)
    process.stdout.close()
    wait_until(lambda: not processes_naming(str(tmp_path)))


def test_a_folder_that_is_not_there_is_an_error(python, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        python("", cwd=tmp_path / "nowhere")


def test_files_that_it_is_given_have_their_numbers(python):
    end, start = os.pipe()
    process = python("import os, sys; os.write(int(sys.argv[1]), b'here')", str(start), pass_fds=[start])
    os.close(start)
    with open(end, "rb") as pipe:
        assert pipe.read() == b"here"
    assert process.wait(240) == 0
