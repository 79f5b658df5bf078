"""A parameter server's process: one share of the weights, one socket, one loop.

    python -m training.parameter_server.server --job JOB --number K --servers S --folder F [--listen HOST:PORT]
        [--key-file K] [--parent PID] [--fresh]

`F/server-K.json` tells where it listens. It may be killed at any moment and started again on the same folder. It goes
on with what it saved last, to `F/server-K.safetensors`, some seconds before: the pushes and meetings since then are
lost, as are gradients of a dead learner, and versions go back with the weights, so that the staleness of gradients that
were under way counts from zero. Learners repeat what was not answered; what the save holds is not applied again. A
server that is told to end (SIGTERM) saves first and loses nothing.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import zmq

from training.job import TrainJob
from training.learner.flat import FlatParameters
from training.parameter_server.layout import layout
from training.parameter_server.messages import LONGEST, SILENCE_S
from training.parameter_server.service import ShareService
from training.parameter_server.share import Share
from training.processes import logs
from training.processes.children import end_with_parent
from training.processes.exit_reason import CANNOT_WORK, run_with_reason
from training.processes.keys import RingKey
from training.processes.sockets import announce, bind, end_context, listening_endpoint, server_parser

log = logging.getLogger(__name__)

POLL_S = 0.1
TURN = 16
"""Requests before it is looked whether a save is due."""


def note_file(folder: Path, number: int) -> Path:
    """Where a server tells its address."""
    return folder / f"server-{number}.json"


def open_service(job: TrainJob, folder: Path, number: int, servers: int, fresh: bool) -> ShareService:
    """The share of a server, as it was saved or empty.

    Args:
        job: What is trained.
        folder: Of the servers' files.
        number: Which server, from 0.
        servers: How many there are.
        fresh: Forget what was saved.

    Raises:
        ValueError: If there is no such server, or the saved file is damaged.
    """
    if not 0 <= number < servers:
        raise ValueError(f"--number is {number} of {servers} servers: give 0 to {servers - 1}")
    # the model tells where its parameters lie; its weights come from the first learner
    share = Share(layout(FlatParameters(job.spec.build_model()), number, servers), job.train.optimizer)
    return ShareService(share, job.run, folder / f"server-{number}.safetensors", fresh)


class ShareServer:
    """Answers requests to one share.

    Args:
        service: The share.
        endpoint: Where to listen.
        key: The ring's key.
        note: Where to tell the address.

    Raises:
        ValueError: If it cannot listen there.
    """

    def __init__(self, service: ShareService, endpoint: str, key: RingKey | None, note: Path) -> None:
        self.service = service
        self._stop = False
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = bind(self._context, endpoint, key, LONGEST, SILENCE_S)
        except BaseException:
            # otherwise whoever collects the context waits for its socket
            self._context.destroy(0)
            raise
        log.info("parameter server %d listens at %s", service.share.layout.number, announce(self._socket, note))

    def stop(self) -> None:
        """End the loop soon."""
        self._stop = True

    def run(self) -> None:
        """Answer until stopped; then save."""
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
        """Answer the next request, if there is one."""
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
    parser.add_argument("--number", type=int, required=True, help="which server this is, from 0")
    parser.add_argument("--servers", type=int, required=True, help="how many there are")
    parser.add_argument("--folder", type=Path, required=True, help="for server-K.json and what is saved")
    parser.add_argument("--fresh", action="store_true", help="wait for new weights, whatever was saved")
    return parser.parse_args()


def main() -> int:
    """Run a server until it is told to end (SIGTERM, SIGINT)."""
    arguments = _arguments()
    if arguments.parent:
        end_with_parent(arguments.parent)
    logs.setup(f"server {arguments.number}")
    # an optimizer's step is bound by memory, and the cores are the learners'
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(run_with_reason(main, CANNOT_WORK))
