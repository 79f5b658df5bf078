"""Child processes that end with their parent, and that are ended within a bounded time."""

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent dies, kill -9 included; elsewhere do nothing.

    Args:
        parent: The parent's process number, from the parent itself: it may have died before this process could ask.
        number: The signal.

    Raises:
        SystemExit: If the parent is dead already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        raise SystemExit("the parent died before this process could begin")


def stop(process: "subprocess.Popen[bytes]", patience_s: float = 8.0) -> None:
    """End a child: politely, then not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
