"""Ctrl-C at the end of a flow was dropped by a library: the command said "interrupted", and ended with status 0.

A script would have gone on.
"""

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.real_interpreter

SCRIPT = """
import os
import signal
from contextlib import suppress
from flows.cli.common import interruptible

with interruptible():
    with suppress(BaseException):
        os.kill(os.getpid(), signal.{name})
        signal.pause()
print("went on")
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_dropped_interruption_ends_the_command(name, status):
    code = SCRIPT.format(name=name)
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, "went on" in ended.stdout) == (status, False)
    assert "interrupted" in ended.stderr
