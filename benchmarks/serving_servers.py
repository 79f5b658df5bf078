"""Servers that `benchmarks.serving` measures: started on one core, watched, suspended while another one is measured."""

import http.client
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import BenchmarkError
from benchmarks.serving_clients import FileClient, OpenAiFiles, OwnStreams, SherpaFiles, SherpaStreams, StreamProtocol
from training.processes.children import Child, bind_to_parent, stop

_START_S = 300.0
_SHERPA_RATE = 16000
_USUAL_FILES = 1024
"""Open files that most systems allow a process unless it asks for more."""


@dataclass(frozen=True)
class Contender:
    """A server to measure.

    Attributes:
        name: For the tables.
        command: What starts it, with `{port}` for its port.
        streams: How streams are spoken to it; None if it has none.
        files: How files are sent to it; likewise.
        model: Name of its model for clients.
    """

    name: str
    command: tuple[str, ...]
    streams: StreamProtocol | None = None
    files: type[FileClient] | None = None
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """A rival as the command line gives it: KIND=COMMAND, or KIND:MODEL=COMMAND.

        Raises:
            ValueError: There is no such kind, or no place for the port.
        """
        about, _, command = text.partition("=")
        kind, _, model = about.partition(":")
        if kind not in RIVALS or "{port}" not in command:
            raise ValueError(f"--rival {text}: give KIND=COMMAND, {{port}} in it, and a KIND of {', '.join(RIVALS)}")
        return cls(kind, tuple(shlex.split(command)), *RIVALS[kind], model)


RIVALS: dict[str, tuple[StreamProtocol | None, type[FileClient] | None]] = {
    "sherpa-streams": (SherpaStreams(), None),
    "sherpa-files": (None, SherpaFiles),
    "openai": (None, OpenAiFiles),
}
"""Kinds of servers beside our own, by how they are spoken to."""


def own_server(bundle: Path, streams: int, chunk_ms: float = 0.0, **limits: float) -> Contender:
    """`starling serve`, with limits that let a number of streams in.

    Args:
        bundle: The model's folder.
        streams: At most; as many again may be ending.
        chunk_ms: Audio between two partial results, and that a model which streams hears at once; 0: as usual.
        **limits: Other limits.
    """
    values = {"streams": 2 * streams + 24, "per_client": 2 * streams + 24, "connections": max(512, 4 * streams)}
    words = [sys.executable, "-m", "starling", "serve", str(bundle), "--port", "{port}"]
    for name, value in (values | limits).items():
        words += ["--limit", f"{name}={value}"]
    return Contender("starling", tuple(words), OwnStreams(chunk_ms), OpenAiFiles)


def sherpa_rival(export: Path, programs: Path, files: bool) -> Contender:
    """sherpa-onnx's own server, in C++ (package `sherpa-onnx-bin`), with a model that `starling export` has written.

    Args:
        export: The exported folder, in the layout `sherpa-onnx`.
        programs: Folder of its programs.
        files: Whether it serves files; else streams.

    Raises:
        ValueError: The model is not one for this server.
    """
    about = json.loads((export / "model.json").read_text(encoding="utf-8"))
    options, stream = about["sherpa_onnx"], about.get("stream")
    if files == bool(stream):
        raise ValueError(f"--sherpa-onnx {export}: the model is exported for {'streams' if stream else 'files'} only")
    graphs = {name: str(export / f"{name}.onnx") for name in about["graphs"]}
    words = ["--port={port}", f"--tokens={export / 'tokens.txt'}", "--num-threads=1"]
    words.append(f"--feat-dim={options['features']['feature_dim']}")
    words += [f"--{name.replace('_', '-')}={value}" for name, value in options["search"].items()]
    if stream:  # endpoints start the network of a CTC model again
        words += [f"--sample-rate={about['sample_rate']}", "--enable-endpoint=false"]
        words.append(f"--end-tail-padding={max(0.01, stream['tail_s'])}")
    elif about["sample_rate"] != _SHERPA_RATE:
        raise ValueError(f"--sherpa-onnx {export}: its server for files computes features at {_SHERPA_RATE} Hz only")
    if about["system"] == "ctc":
        words.append(f"--zipformer{'2' if stream else ''}-ctc-model={graphs['model']}")
    else:
        words += [f"--encoder={graphs['encoder']}", f"--decoder={graphs['predictor']}", f"--joiner={graphs['joiner']}"]
    program = str(programs / f"sherpa-onnx-{'offline' if files else 'online'}-websocket-server")
    ways = RIVALS["sherpa-files" if files else "sherpa-streams"]
    return Contender("sherpa-onnx", (program, *words), *ways)


class Server:
    """A running server.

    Args:
        contender: Which one.
        folder: For its log.
        core: That it may use.

    Raises:
        BenchmarkError: It does not start.
    """

    def __init__(self, contender: Contender, folder: Path, core: int) -> None:
        self.folder = folder
        self.name, self.contender = contender.name, contender
        self.port = free_port()
        words = [word.replace("{port}", str(self.port)) for word in contender.command]
        command = ["prlimit", f"--nofile={_USUAL_FILES}:", "taskset", "-c", str(core), *words]
        log = folder / f"{contender.name}.log"
        self._child = Child(command, log, {"OMP_NUM_THREADS": "1"}, preexec_fn=bind_to_parent, cwd=folder)
        self.process = psutil.Process(self._child.pid)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not _answers(self.port):
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"{self.name} does not start:\n{self._child.tail()}")
            time.sleep(0.2)

    def file_client(self, source: str | None = None) -> FileClient:
        """A connection for files; `source` is the address to connect from."""
        assert self.contender.files is not None
        return self.contender.files(self.port, self.contender.model, source)

    def stop(self) -> None:
        """Stop it."""
        with suppress(psutil.NoSuchProcess):
            self.process.resume()
        stop(self._child, 15.0)

    def check(self) -> None:
        """See that it still runs.

        Raises:
            BenchmarkError: It does not.
        """
        if self._child.poll() is not None:
            raise BenchmarkError(f"{self.name} has ended with status {self._child.returncode}:\n{self._child.tail()}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """It runs; outside of such blocks it is suspended, so that others have the core."""
        self.process.resume()
        try:
            yield
        finally:
            self.process.suspend()

    @property
    def resident_mb(self) -> float:
        """Its memory, in 10⁶ bytes."""
        return self.process.memory_info().rss / 1e6

    @property
    def cpu_s(self) -> float:
        """CPU time so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    @property
    def files(self) -> int:
        """Open files and connections."""
        return self.process.num_fds()


@contextmanager
def running(contenders: Sequence[Contender], core: int) -> Iterator[list[Server]]:
    """Servers, all of them suspended; they are stopped at the end."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for contender in contenders:
                servers.append(Server(contender, Path(folder), core))
                servers[-1].process.suspend()
            yield servers
        finally:
            for server in servers:
                server.stop()


def split_cores() -> int:
    """Leave one core to servers, and take the others for this process, whose threads and processes follow it.

    Returns:
        The core for servers.

    Raises:
        BenchmarkError: A program is missing.
    """
    if missing := [name for name in ("taskset", "prlimit") if shutil.which(name) is None]:
        raise BenchmarkError(f"this needs {' and '.join(missing)}: install util-linux")
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        print("there is one core only: clients and server share it, and no figure is the server's own", file=sys.stderr)
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, others or [first])
    return first


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _answers(port: int) -> bool:
    """Whether a server accepts connections and speaks HTTP; a WebSocket server refuses the request."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
