"""`starling transcribe DIR | head` ended in BrokenPipeError, and `starling … > /dev/full` in a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytestmark = pytest.mark.real_interpreter

PROGRAM = """
from flows.cli.output import guarded_output
with guarded_output():
    import sys
    {body}
"""
BODIES = {
    "written": "[print('x' * 100) for _ in range(2000)]",
    "waiting": "print('one line')",  # until the end
    "flushed": "sys.stdout.write('x'); sys.stdout.flush()",
    "rich": "from rich.console import Console; Console().print('x')",
    "then an exit": "print('x'); raise SystemExit(0)",
}
COMMAND = [sys.executable, "-m", "flows.cli.app", "corpus", "list"]


def run(words, out, home):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(home), "NO_COLOR": "1"}
    return subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, env=env, timeout=240, cwd=ROOT)


def closed_pipe():
    """The end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("body", [*BODIES.values(), COMMAND], ids=[*BODIES, "a command"])
def test_command_ends_silently_when_its_pipe_is_closed(body, tmp_path):
    words = body if body is COMMAND else [sys.executable, "-c", PROGRAM.format(body=body)]
    pipe = closed_pipe()
    done = run(words, pipe, tmp_path)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("body", [*BODIES.values(), COMMAND], ids=[*BODIES, "a command"])
def test_command_reports_full_disk_in_one_line(body, tmp_path):
    words = body if body is COMMAND else [sys.executable, "-c", PROGRAM.format(body=body)]
    with Path("/dev/full").open("wb") as full:
        done = run(words, full, tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: standard output cannot be written (No space left on")
    assert len(done.stderr.strip().splitlines()) == 1


def test_command_works_with_closed_standard_output(tmp_path):
    words = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, PROGRAM.format(body="print('x'); sys.stdout.flush()")]
    done = run(words, None, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
