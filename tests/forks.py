"""Child processes of tests without the seconds that an interpreter's imports cost.

torch, MLflow and Prefect take an interpreter two to seven seconds of CPU time, and the tests start hundreds. Under
xdist, as `make test` runs them, each test process therefore has a fork server: an interpreter that has imported these
libraries, but nothing of ours, and forks. The fork is a child of the process that asked for it (the one in between
ends at once, while the asking process is the subreaper) and takes over command, environment, folder, streams, session
and parent-death signal. What else a process has from its parent must be as the fork server has it (`_state`). A fork
that starts such processes itself has a fork server of its own.

Forked are `python -m` of MODULES and `python -c` of a `Forked` program. They get an interpreter of their own
- in tests marked `real_interpreter`, whose point is how an interpreter starts or ends;
- with STARLING_TESTS_FORK=0, as `make test-all` sets it, and without xdist, unless STARLING_TESTS_FORK=1;
- if anything is out of the ordinary: other arguments of Popen, another thread, an environment that differs from the
  fork server's in more than LATE, a sitecustomize.py.

How forks still differ from interpreters: those of one fork server have the same hash seed; libraries are in sys.modules
(not Prefect) before they are imported, and are not taken down module by module at the end.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

SPAWNERS = {"flows.cli.app", "mlflow", "training.node", "training.rank", "training.supervise"}
MODULES = SPAWNERS | {"training.evaluator", "uvicorn"}  # others start as fast by themselves
# beginnings of the names of variables that a library reads when it is used; others may be read while it is loaded
LATE = (
    *("AWS_", "COLUMNS", "DO_NOT_TRACK", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "MLFLOW_DISABLE_TELEMETRY"),
    *("MLFLOW_ENABLE_ARTIFACTS_", "MLFLOW_SERVER_", "MLFLOW_SUPPRESS_PRINTING_", "MLFLOW_TRACKING_", "NO_COLOR"),
    *("PREFECT_API_URL", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_HOME", "PREFECT_LOGGING_HANDLERS_"),
    *("PREFECT_RESULTS_DEFAULT_SERIALIZER", "PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_UI_API_URL", "PYTEST_"),
    *("PYTHONPATH", "PYTORCH_ALLOC_CONF", "STARLING_", "TORCHINDUCTOR_CACHE_DIR"),
    *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "_MLFLOW_"),
)
USUAL = {"executable": None, "close_fds": True, "shell": False, "restore_signals": True, "umask": -1}
USUAL |= {"uid": None, "gid": None, "gids": None}
THREADS = weakref.WeakSet({threading.main_thread()})
"""Whose children may be forks. Linux tells a child when the thread that started it ends, and a fork when the main one
does: a test adds only a thread that waits for its children."""
ROOM = " " * (64 << 10)  # a command line and an environment of this length hold those of a fork
SUBREAPER, GET_SUBREAPER = 36, 37
libc = ctypes.CDLL(None)
start_interpreter = subprocess.Popen._execute_child
switch = {"on": True}


class Forked(str):
    """A program that `python -c` may run in a fork."""


@contextlib.contextmanager
def switched_off():
    """Every process that is started in the block is an interpreter of its own, and so are those that it starts."""
    before, switch["on"] = switch["on"], False
    try:
        yield
    finally:
        switch["on"] = before


def installed():
    """Whether this process has a fork server, or starts one when it needs it."""
    return subprocess.Popen._execute_child is not start_interpreter


def install(environment):
    """Let this process have a fork server, which its first use starts.

    Args:
        environment: The fork server's: one that names no test's folder.
    """
    environment = environment | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}  # as the command sets them
    environment.pop("PYTHONPATH", None)

    @functools.cache
    def server():
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, Path(__file__).with_name("fork_server.py"), str(theirs.fileno()), ROOM]
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            process = subprocess.Popen(command, env=environment | {"ROOM": ROOM}, **streams)
        made = Server(ours, environment)
        atexit.register(lambda: (made.channel.close(), process.wait()))
        return made

    use(server)


def use(server):
    """Let Popen ask a fork server, which a function gives."""
    names = inspect.signature(start_interpreter)

    def execute(self, *arguments):
        asked = names.bind(self, *arguments).arguments
        if switch["on"] and is_known(asked["args"]) and (pid := server().fork(asked)):
            self.pid, self._child_created = pid, True
            self._close_pipe_fds(*(asked[pipe + end] for pipe in ("p2c", "c2p", "err") for end in ("read", "write")))
        else:
            start_interpreter(self, *arguments)

    subprocess.Popen._execute_child = execute


def is_known(words):
    if not isinstance(words, list) or len(words) < 3 or words[0] != sys.executable:
        return False
    return (words[1] == "-m" and words[2] in MODULES) or (words[1] == "-c" and isinstance(words[2], Forked))


class Server:
    """A fork server, as the process sees it that has it as its child.

    Args:
        channel: To the fork server; a request or an answer is one packet.
        environment: That in which it has imported the libraries.
    """

    def __init__(self, channel, environment):
        self.channel, self.environment, self.state = put_away(channel), environment, _state()
        self.channel.settimeout(240.0)
        self.lock = threading.Lock()

    def fork(self, asked):
        """The number of a new process that is this one's child; 0 if it takes an interpreter of its own.

        Args:
            asked: The arguments of `Popen._execute_child`.
        """
        request = self.request(asked)
        files = [n if fd == -1 else fd for n, fd in enumerate((asked["p2cread"], asked["c2pwrite"], asked["errwrite"]))]
        before = ctypes.c_int()
        with self.lock:
            libc.prctl(GET_SUBREAPER, ctypes.byref(before))
            libc.prctl(SUBREAPER, 1)
            try:
                if request:
                    socket.send_fds(self.channel, [request], [*files, *asked["pass_fds"]])
                return int((request and self.channel.recv(64)) or 0)
            except ConnectionError:
                return 0
            except BaseException:
                self.channel.shutdown(socket.SHUT_RDWR)  # the answer would be taken for the next one's
                raise
            finally:
                libc.prctl(SUBREAPER, before.value)

    def request(self, asked):
        """What to ask the fork server for; empty if it cannot do that."""
        death, cwd = asked["preexec_fn"], Path(os.fsdecode(asked["cwd"] or "")).absolute()
        if isinstance(death, functools.partial) and death.func.__name__ == "bind_to_parent":
            death = int(death.args[0])
        given = os.environ if asked["env"] is None else asked["env"]
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
        path = [str(cwd / folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
        request = {"args": [os.fsdecode(word) for word in asked["args"]], "env": env, "cwd": str(cwd), "path": path}
        request |= {"session": bool(asked["start_new_session"]), "group": asked["process_group"], "death": death or 0}
        fits = (
            all(asked[name] == value for name, value in USUAL.items())
            and not callable(death)
            and threading.current_thread() in THREADS
            and _state() == self.state
            and early(env) == early(self.environment)
            and not any(Path(folder, "sitecustomize.py").exists() for folder in path)
            and cwd.is_dir()
        )
        data = json.dumps(request | {"targets": [0, 1, 2, *asked["pass_fds"]]}).encode() if fits else b""
        return data if len(data) < len(ROOM) else b""


def put_away(channel):
    """The same socket by a number that no child process is given a file by."""
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, 900))


def early(environment):
    """The variables that may be read while libraries are loaded."""
    return {name: value for name, value in environment.items() if not name.startswith(LATE)}


def _state():
    """What a process has from its parent, besides files, folder and environment."""
    names = ("Tgid:", "Umask:", "Uid:", "Gid:", "SigBlk:", "SigIgn:")
    status = Path("/proc/thread-self/status").read_text().splitlines()
    group = (os.getsid(0), os.getpgrp(), os.getpriority(os.PRIO_PROCESS, 0), os.readlink("/proc/self/ns/net"))
    limits = Path("/proc/self/limits").read_text()
    return [line for line in status if line.startswith(names)], group, limits, os.sched_getaffinity(0)
