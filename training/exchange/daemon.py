"""The exchange's daemon process: `python -m training.exchange.daemon MEMORY CONTROL BELL PARENT`.

The training process starts it, shares memory, a socket pair and a bell with it (as inherited descriptors), and sends
the setup as the first line. The key is part of the setup, so that no process list shows it. The daemon ends with its
parent.
"""

import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training.exchange.control import Control
from training.exchange.mailbox import Bell, Mailbox
from training.exchange.replicas import ReplicaGiver, ReplicaMemory
from training.processes import logs
from training.processes.children import end_with_parent

if TYPE_CHECKING:
    from training.exchange.averaging import Averaging

_SETUP_S = 30.0


def main(argv: list[str], serve: "Callable[[dict[str, Any], Mailbox, Control], int] | None" = None) -> int:
    """Serve one exchange until the training process stops it or ends.

    Args:
        argv: Descriptors of the memory, the control socket and the bell, and the parent's process id.
        serve: Serves it until the training process closes its end; by default over ZeroMQ.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C and stops this process
    end_with_parent(int(argv[3]), signal.SIGKILL)
    logs.setup("exchange")
    control = Control(socket.socket(fileno=int(argv[1])))
    setup = _setup(control)
    mailbox = Mailbox(int(argv[0]), int(setup["size"]), Bell(rings=int(argv[2])))
    return (serve or serve_zmq)(setup, mailbox, control)


def _setup(control: Control) -> dict[str, Any]:
    deadline = time.monotonic() + _SETUP_S
    while not control.closed and time.monotonic() < deadline:
        control.wait(1.0)
        if messages := control.receive():
            return messages[0]
    raise SystemExit("the training process sent no setup")


def _replicas(setup: dict[str, Any]) -> ReplicaGiver | None:
    """Build the giver of weights and optimizer state, if the training process shares memory for it."""
    if "replica" not in setup:
        return None
    shared = setup["replica"]
    memory = ReplicaMemory(int(shared["file"]), int(shared["length"]))
    return ReplicaGiver(memory, str(shared["optimizer"]), int(setup["chunk"]), float(setup["timeout_s"]))


def serve_zmq(
    setup: dict[str, Any],
    mailbox: Mailbox,
    control: Control,
    averaging: "Averaging | None" = None,
    cpu_s: Callable[[], float] = time.process_time,
) -> int:
    """Serve one exchange over ZeroMQ until the training process closes its end; returns the exit status.

    Args:
        setup: See `ZmqDaemon`.
        mailbox: Shared with the training process.
        control: Connection to the training process.
        averaging: Averages the weights; by default those in the mailbox.
        cpu_s: Returns the exchange's CPU time, in seconds.
    """
    import zmq

    from training.exchange.zmq_daemon import ZmqDaemon

    try:
        daemon = ZmqDaemon(setup, mailbox, control, _replicas(setup), averaging, cpu_s)
    except (zmq.ZMQError, ValueError) as error:
        taken = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
        control.send({"error": "taken" if taken else "setup", "why": str(error)})
        return 2
    control.send({"listening": daemon.endpoint})
    try:
        daemon.run()
    finally:
        daemon.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
