"""Child processes of tests without the seconds that an interpreter's imports cost.

    forks.install(environment)     lets `subprocess.Popen` of this process use a fork server
    python tests/forks.py FD …     a fork server, which is asked over socket FD

torch, MLflow and Prefect take an interpreter five seconds of CPU time, and the tests start hundreds. Under xdist, as
`make test` runs them, each test process therefore has a fork server: an interpreter that has imported the libraries,
and nothing of ours, and forks. What a test gets is a child like any other: its own process number, working folder,
environment, streams, signals, session and exit status. It is a child of the process that asked, because that process
is the subreaper for as long as it asks, and the process in between ends at once. A fork that starts processes itself
has a fork server of its own.

Only `python -m` of MODULES and `python -c` of a `Forked` program are forked, if nothing else is out of the ordinary:
`Server.request` lists what a fork must have in common with its server. Everything else gets an interpreter of its own.
A fork differs from one in this: the forks of a server have one hash seed, libraries are in memory before they are
imported, and they have read their settings (names other than LATE) in the server's environment, which is the same.

A test whose point is how an interpreter starts or ends is marked `real_interpreter`. With STARLING_TESTS_FORK=0, which
`make test-all` sets, and for tests that run without xdist, nothing is forked; STARLING_TESTS_FORK=1 forks there, too.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SPAWNERS = {"flows.cli.app", "mlflow", "training.node", "training.rank", "training.supervise"}
MODULES = SPAWNERS | {"training.evaluator", "training.parameter_server.server", "training.store.server", "uvicorn"}
IMPORTED = (
    "torch",
    "scipy.signal",
    "matplotlib.pyplot",
    "pandas",
    "s3fs",
    "alembic.command",
    "flask_cors",
    "uvicorn.main",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "prefect.server.api.server",
    "prefect.task_runners",
    "prefect.artifacts",
)
# beginnings of environment variables that are read when they are used; others are read while libraries are loaded
LATE = (
    "AWS_",
    "COLUMNS",
    "DO_NOT_TRACK",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_SERVER_",
    "MLFLOW_TRACKING_",
    "NO_COLOR",
    "PREFECT_API_URL",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
    "PREFECT_HOME",
    "PREFECT_LOGGING_HANDLERS_",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER",
    "PREFECT_SERVER_ANALYTICS_ENABLED",
    "PREFECT_UI_API_URL",
    "PYTEST_",
    "PYTHONPATH",
    "STARLING_",
    "_MLFLOW_",
)
ROOM = " " * (64 << 10)
"""Makes a server's command line and environment long enough for those of its forks, which /proc shows in their place."""
_LARGEST = 96 << 10  # bytes of a request
_PATIENCE_S = 240.0
_PDEATHSIG, _SUBREAPER, _GET_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None, use_errno=True)
_execute = subprocess.Popen._execute_child
_switch = {"on": True}


class Forked(str):
    """A program for `python -c` that may run in a fork."""


class Server:
    """A fork server, as the process sees it that has it as its child.

    Args:
        channel: To the server; a request or an answer is one packet.
        environment: That in which the server has imported the libraries.
    """

    def __init__(self, channel: socket.socket, environment: dict[str, str]) -> None:
        self.channel, self.environment, self.state = _put_away(channel), environment, _state()
        self.channel.settimeout(_PATIENCE_S)

    def request(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]] | None:
        """What to ask the server for, and the files to give; None if it takes an interpreter of its own.

        Args:
            asked: The arguments of `Popen._execute_child`.
        """
        usual = {"executable": None, "close_fds": True, "shell": False, "restore_signals": True, "umask": -1}
        usual |= {"uid": None, "gid": None, "gids": None}
        preexec = asked["preexec_fn"]
        bound = isinstance(preexec, functools.partial) and preexec.func.__name__ == "bind_to_parent"
        if any(asked[name] != value for name, value in usual.items()) or not (preexec is None or bound):
            return None
        # Linux tells a child when the thread ends that started it; for a fork that is the main thread
        if threading.current_thread() is not threading.main_thread() or _state() != self.state:
            return None
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if asked["env"] is None else asked["env"]).items()}
        cwd = Path(os.fsdecode(asked["cwd"] or "")).absolute()
        path = [str(cwd / folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if _early(env) != _early(self.environment) or any(Path(p, "sitecustomize.py").exists() for p in path):
            return None
        streams = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        request = {
            "args": [os.fsdecode(word) for word in asked["args"]],
            "env": env,
            "path": path,
            "cwd": str(cwd),
            "session": bool(asked["start_new_session"]),
            "group": asked["process_group"],
            "death": int(preexec.args[0]) if bound else 0,
            "targets": [0, 1, 2, *asked["pass_fds"]],
        }
        return (request, [*files, *asked["pass_fds"]]) if cwd.is_dir() else None

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Number of a new process, a child of this one; 0 if the server is gone or the request is too long for it."""
        data = json.dumps(request).encode()
        if len(data) > _LARGEST:
            return 0
        before = ctypes.c_int()
        _libc.prctl(_GET_SUBREAPER, ctypes.byref(before))
        _libc.prctl(_SUBREAPER, 1)
        try:
            socket.send_fds(self.channel, [data], files)
            return int(self.channel.recv(64) or 0)
        except ConnectionError:
            return 0
        except BaseException:
            self.channel.shutdown(socket.SHUT_RDWR)  # the answer would be taken for the next one's
            raise
        finally:
            _libc.prctl(_SUBREAPER, before.value)


def _put_away(channel: socket.socket) -> socket.socket:
    """The same socket by a number that no child process is given a file by."""
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, 900))


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(LATE)}


def _state() -> tuple[object, ...]:
    """What a process has from its parent, besides files, folder and environment: a fork has it from its server."""
    status = Path("/proc/self/status").read_text().splitlines()
    inherited = [line for line in status if line.startswith(("Pid:", "Umask:", "Uid:", "Gid:", "SigBlk:", "SigIgn:"))]
    group = (os.getsid(0), os.getpgrp(), os.getpriority(os.PRIO_PROCESS, 0), os.readlink("/proc/self/ns/net"))
    return inherited, Path("/proc/self/limits").read_text(), group, os.sched_getaffinity(0)


def install(environment: dict[str, str]) -> None:
    """Let `subprocess.Popen` of this process fork, from a server that the first call that can starts.

    Args:
        environment: The server's: one that names no test's folder.
    """
    base = environment | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}  # as the command sets them
    base.pop("PYTHONPATH", None)

    @functools.cache
    def server() -> Server:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), ROOM]
            options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            process = subprocess.Popen(command, env=base | {"ROOM": ROOM}, **options)
        started = Server(ours, base)
        atexit.register(lambda: (started.channel.close(), process.wait()))
        return started

    _intercept(server)


def installed() -> bool:
    """Whether processes of this one are forked."""
    return subprocess.Popen._execute_child is not _execute


def _intercept(server: Callable[[], Server]) -> None:
    names = inspect.signature(_execute)

    def execute(self: Any, *arguments: Any) -> None:
        asked = names.bind(self, *arguments).arguments
        found = server().request(asked) if _switch["on"] and _is_known(asked["args"]) else None
        if found and (pid := server().fork(*found)):
            self.pid, self._child_created = pid, True
            self._close_pipe_fds(*(asked[f"{name}{end}"] for name in ("p2c", "c2p", "err") for end in ("read", "write")))
        else:
            _execute(self, *arguments)

    subprocess.Popen._execute_child = execute


def _is_known(words: Any) -> bool:
    if not isinstance(words, list) or len(words) < 3 or words[0] != sys.executable:
        return False
    return (words[1] == "-m" and words[2] in MODULES) or (words[1] == "-c" and isinstance(words[2], Forked))


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Every process that is started in the block is an interpreter of its own, and so are those that it starts."""
    before, _switch["on"] = _switch["on"], False
    try:
        yield
    finally:
        _switch["on"] = before


def serve(channel: socket.socket, environment: dict[str, str]) -> dict[str, Any]:
    """Fork as asked until the process that asks ends.

    Returns:
        In a fork, what it is to be.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for those that ask
    while True:
        data, fds, *_ = socket.recv_fds(channel, 2 * _LARGEST, 64)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                return _become(json.loads(data), fds, channel, environment)
            except BaseException:
                channel.send(b"0")
                raise
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(
    request: dict[str, Any], fds: list[int], channel: socket.socket, environment: dict[str, str]
) -> dict[str, Any]:
    """Take on what an interpreter would have from its parent; and start an own server, which returns in its forks."""
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["args"][2] in SPAWNERS or request["args"][1] == "-c":
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for fd in (ours, channel):
                fd.close()
            for fd in fds:
                os.close(fd)
            return serve(_put_away(theirs), environment)
        theirs.close()
        own = Server(ours, environment)
        _intercept(lambda: own)
    os.chdir(request["cwd"])
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, request["targets"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    if request["death"]:
        _libc.prctl(_PDEATHSIG, request["death"])
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["args"], [f"{name}={value}" for name, value in request["env"].items()])
    channel.send(str(os.getpid()).encode())
    channel.close()
    return request


def _show(words: list[str], environment: list[str]) -> None:
    """Put a command and an environment where /proc shows them: over those of the server, which have room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, env_begin, env_end = (int(field) for field in fields[45:49])
    for text, first, last in ((words, begin, end), (environment, env_begin, env_end)):
        shown = b"".join(os.fsencode(word) + b"\0" for word in text)
        ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


class _Prefect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Prefect reads its settings when it is imported, and some code asks whether it is: a fork imports it by this."""

    def __init__(self) -> None:
        self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "prefect"}

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "prefect" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        sys.meta_path.remove(self)
        self.spec = self.modules["prefect"].__spec__
        return self.modules["prefect"]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec
        sys.modules.update(self.modules)
        importlib.import_module("prefect.context").refresh_global_settings_context()


def main(channel: socket.socket) -> None:
    """Import the libraries, then fork; a fork runs its module as the interpreter's own, and ends as an interpreter."""
    del os.environ["ROOM"]
    site, environment = sys.path[1:], dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    assert not logging.root.handlers, logging.root.handlers
    assert os.environ == environment, set(os.environ.items()) ^ set(environment.items())
    sys.meta_path.insert(0, _Prefect())
    gc.collect()
    gc.freeze()
    request = serve(_put_away(channel), environment)
    words = request["args"]
    sys.orig_argv, sys.argv = list(words), [words[1], *words[3:]]
    sys.path[:] = ["" if words[1] == "-c" else os.getcwd(), *request["path"], *site]
    importlib.import_module("numpy.random").seed()
    importlib.import_module("torch").seed()
    sys.modules["forks"], module = sys.modules["__main__"], types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    sys.modules["__main__"] = module
    if words[1] == "-c":
        exec(compile(words[2], "<string>", "exec"), module.__dict__)
    else:
        runpy._run_module_as_main(words[2])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
