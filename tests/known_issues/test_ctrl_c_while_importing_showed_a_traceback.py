"""Ctrl-C in the seconds in which the command imports its libraries ended with a traceback of some import."""

import signal
import subprocess
import sys

import pytest
from support import ROOT

from flows.cli import early_interrupt

pytestmark = pytest.mark.real_interpreter

IMPORTS = """
import os, signal, sys
sys.path.insert(0, {root!r})
sys.argv = [{program!r}, "--help"]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from flows.cli.app import main
print("imported")
"""


def run(program):
    text = IMPORTS.format(root=str(ROOT), program=program)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("program", ["/somewhere/bin/starling", "-m"])
def test_command_interrupted_during_imports_ends_with_one_line(program):
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted (Ctrl-C)\n")


def test_importing_the_flows_does_not_change_signal_handlers():
    done = run("/somewhere/bin/prefect")
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode == -signal.SIGINT


def test_usual_signal_handler_is_restored_after_imports(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["starling"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        early_interrupt.hear_interrupts()
        assert signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, before)
        early_interrupt.imported()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background job
        early_interrupt.hear_interrupts()
        early_interrupt.imported()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
