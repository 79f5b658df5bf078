"""A parameter server process: one share of the weights, one socket, one loop.

    python -m training.parameter_server.server --job JOB --number K --servers S --folder F [--listen HOST:PORT]
        [--key-file K] [--parent PID] [--fresh]

`F/server-K.json` contains its address. The server may be killed at any moment and restarted with the same folder. It
then continues from its last save, `F/server-K.safetensors`, which is some seconds old: pushes and elastic updates since
then are lost, like the gradients of a dead learner. Versions go back with the weights, so the staleness of gradients in
flight counts from zero. Learners repeat unanswered requests; what the save contains is not applied again. On SIGTERM a
server saves before it ends, and loses nothing.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import zmq

from training.job import TrainJob
from training.learner.flat import FlatParameters
from training.learner.trained import initial_network
from training.parameter_server.layout import layout
from training.parameter_server.messages import LONGEST, SILENCE_S
from training.parameter_server.service import ShareService
from training.parameter_server.share import Share
from training.processes import logs
from training.processes.children import end_with_parent, on_termination
from training.processes.exit_reason import CANNOT_WORK, run_with_reason
from training.processes.keys import RingKey
from training.processes.sockets import announce, bind, end_context, listening_endpoint, server_parser

log = logging.getLogger(__name__)

POLL_S = 0.1
TURN = 16
"""Maximum number of requests between checks whether a save is due."""


def note_file(folder: Path, number: int) -> Path:
    """File that contains a server's address."""
    return folder / f"server-{number}.json"


def open_service(job: TrainJob, folder: Path, number: int, servers: int, fresh: bool) -> ShareService:
    """Open a server's share, from its last save or empty.

    Args:
        job: The training job.
        folder: Folder of the servers' files.
        number: Number of the server, from 0.
        servers: Number of servers.
        fresh: Discard the last save.

    Raises:
        ValueError: If there is no such server, or the saved file is damaged.
    """
    if not 0 <= number < servers:
        raise ValueError(f"--number is {number} of {servers} servers: give 0 to {servers - 1}")
    # the model is only needed for the layout of its parameters; the weights come from the first learner
    initial = initial_network(job)
    share = Share(layout(FlatParameters(initial.network), number, servers, initial.rates), job.train.optimizer)
    return ShareService(share, job.run, folder / f"server-{number}.safetensors", fresh)


class ShareServer:
    """Answers requests for one share.

    Args:
        service: The share's service.
        endpoint: ZeroMQ endpoint to listen on.
        key: The ring's key.
        note: File for the server's address.

    Raises:
        ValueError: If it cannot listen on the endpoint.
    """

    def __init__(self, service: ShareService, endpoint: str, key: RingKey | None, note: Path) -> None:
        self.service = service
        self._stop = False
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = bind(self._context, endpoint, key, LONGEST, SILENCE_S)
        except BaseException:
            # else the garbage collection of the context would wait for its socket
            self._context.destroy(0)
            raise
        log.info("parameter server %d listens at %s", service.share.layout.number, announce(self._socket, note))

    def stop(self) -> None:
        """End the loop after the current iteration."""
        self._stop = True

    def run(self) -> None:
        """Answer requests until stopped, then save."""
        while not self._stop:
            if self._socket.poll(int(POLL_S * 1000)):
                for _ in range(TURN):
                    if not self._serve():
                        break
            self.service.save_if_due()
        self.service.close()
        self._socket.close()
        end_context(self._context)

    def _serve(self) -> bool:
        """Answer the next request; returns whether there was one."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        answer = self.service.handle(frames)
        if answer is not None:
            self._socket.send_multipart([identity, *answer], copy=False)
        return True


def _arguments() -> argparse.Namespace:
    parser = server_parser("training.parameter_server.server", "A share of a training's parameter server.")
    parser.add_argument("--number", type=int, required=True, help="number of this server, from 0")
    parser.add_argument("--servers", type=int, required=True, help="number of servers")
    parser.add_argument("--folder", type=Path, required=True, help="folder of server-K.json and of the saves")
    parser.add_argument("--fresh", action="store_true", help="discard the last save and wait for new weights")
    return parser.parse_args()


def main() -> int:
    """Run a server until SIGTERM or SIGINT."""
    arguments = _arguments()
    if arguments.parent:
        end_with_parent(arguments.parent)
    logs.setup(f"server {arguments.number}")
    # an optimizer step is memory-bound, and the cores are for the learners
    torch.set_num_threads(1)
    note = note_file(arguments.folder, arguments.number)
    try:
        job = TrainJob.model_validate_json(arguments.job.read_bytes())
        key = RingKey.load(arguments.key_file) if arguments.key_file else None
        arguments.folder.mkdir(parents=True, exist_ok=True)
        service = open_service(job, arguments.folder, arguments.number, arguments.servers, arguments.fresh)
        server = ShareServer(service, listening_endpoint(arguments.listen, note, arguments.fresh), key, note)
    except (OSError, ValueError) as error:
        print(f"parameter server {arguments.number} cannot start: {error}", file=sys.stderr, flush=True)
        return CANNOT_WORK
    on_termination(server.stop)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(run_with_reason(main, CANNOT_WORK))
