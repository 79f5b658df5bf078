"""Start the tests' Python child processes by fork from a pre-imported interpreter.

Importing torch, MLflow and Prefect costs an interpreter two to seven seconds of CPU, and the tests start hundreds of
them. Under xdist, which `make test` uses, there is therefore a fork server (tests/fork_server.py): an interpreter that
has imported these libraries and most of our modules, and forks on request. `subprocess.Popen` is patched to ask it. The
new process is a child of the process that asked; it gets the command, environment, working directory, file descriptors,
session, process group and parent-death signal that Popen was given. A fork that may start Python processes itself has a
fork server of its own, which is a fork as well. The test processes are such forks, so that all of them together import
the libraries once.

Forked are the test processes of xdist, `python -m` with one of MODULES, `python -c` with a `Forkable` program, and the
processes that multiprocessing starts by `spawn`, as pools of processes do. Otherwise an interpreter is started as usual
- in tests marked `real_interpreter`: those about how an interpreter starts or exits;
- if STARLING_TESTS_FORK=0, which `make test-all` sets; without xdist, unless STARLING_TESTS_FORK=1; not on Linux;
- if the process would differ from a fork: unusual arguments of Popen, a thread outside THREADS, a terminal as a stream,
  limits, umask and the like that differ from the fork server's (`inherited_state`), a variable that
  libraries may read while they are imported (`import_environment`), a sitecustomize.py other than that of SITE, which
  forks run as well. pytest's summary of warnings then names the reason.

Known differences between a fork and an interpreter: forks of one server share the hash seed; libraries other than
Prefect are in sys.modules before the program imports them; imported modules are not finalized at exit, and C++
destructors of static objects do not run.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import inspect
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

STARTERS = {"flows.cli.app", "mlflow", "tasks.engine", "tasks.stages.separate", "torch.distributed.run"}
STARTERS |= {"training.node.rank"}
"""Modules that start Python processes themselves."""
MODULES = STARTERS | {"training.coordinator.server", "training.exchange.daemon", "training.node.evaluator", "uvicorn"}
"""Modules that import much, or that the tests start often; the others start as fast without a fork."""
READ_WHEN_USED = (
    "AWS_",
    "COLUMNS",
    "DO_NOT_TRACK",
    "GLOO_SOCKET_IFNAME",
    "GROUP_",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_ENABLE_ARTIFACTS_",
    "MLFLOW_ENABLE_WORKSPACES",
    "MLFLOW_SERVER_",
    "MLFLOW_SUPPRESS_PRINTING_",
    "MLFLOW_TRACKING_",
    "NCCL_SOCKET_IFNAME",
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
    "PYTORCH_ALLOC_CONF",
    "RANK",
    "ROLE_",
    "STARLING_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
    "_MLFLOW_",
)
"""Prefixes of variables that no library reads while it is imported: forks may differ from their server in these."""
USUAL = {"executable": None, "close_fds": True, "shell": False, "restore_signals": True, "umask": -1}
USUAL |= {"uid": None, "gid": None, "gids": None}
THREADS = weakref.WeakSet({threading.main_thread()})
"""Threads whose children may be forks. On Linux a child's parent-death signal comes when the thread that started it
ends, a fork's when the main thread does. A test may add a thread that waits for its children."""
SITE = str(Path(__file__).with_name("slow_nodes"))
"""Folder of a sitecustomize.py that changes none of the libraries."""
MAX_REQUEST = 64 << 10
"""Bytes of a request at most, and so of a fork's command line and environment."""
PDEATHSIG, SUBREAPER, GET_SUBREAPER = 1, 36, 37
libc = ctypes.CDLL(None)
start_interpreter = subprocess.Popen._execute_child
spawn_interpreter = multiprocessing.util.spawnv_passfds
OF_A_POOL = "--multiprocessing-fork"
"""The last word of the command with which multiprocessing starts a process by `spawn`."""
OF_XDIST = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""The words of the command with which xdist starts a test process. Its output is unbuffered in a fork, too: it is
nothing but messages, each of which is flushed."""


class Forkable(str):
    """A program for `python -c` that may run in a fork."""


@contextlib.contextmanager
def switched_off():
    """Start interpreters instead of forks within the block."""
    before = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds
    subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = start_interpreter, spawn_interpreter
    try:
        yield
    finally:
        subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = before


def installed():
    """Whether Popen asks a fork server."""
    return subprocess.Popen._execute_child is not start_interpreter


def install(environment):
    """Make Popen ask a fork server, which is started when it is first needed.

    Args:
        environment: The fork server's environment, without variables of a single test.
    """
    environment = environment | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}  # our command sets these
    environment.pop("PYTHONPATH", None)

    @functools.cache
    def server():
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            # the padding makes room for the command lines and environments of forks
            padding = " " * MAX_REQUEST
            command = [sys.executable, Path(__file__).with_name("fork_server.py"), str(theirs.fileno()), padding]
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            process = subprocess.Popen(command, env=environment | {"PADDING": padding}, **streams)
        client = Client(ours, environment, warnings.warn)
        atexit.register(lambda: (client.channel.close(), process.wait()))
        return client

    use(server)


def use(server):
    """Make Popen and multiprocessing ask a fork server.

    Args:
        server: A function that returns its `Client`.
    """
    signature = inspect.signature(start_interpreter)

    def execute_child(self, *arguments):
        wanted = signature.bind(self, *arguments).arguments
        if isinstance(wanted["args"], list) and wanted["args"][1:] == OF_XDIST:
            wanted["args"] = [wanted["args"][0], *map(Forkable, OF_XDIST[1:])]
        if isinstance(wanted["args"], tuple) and wanted["args"][1:3] == ("-u", "-m"):  # torchrun's: they log to stderr
            wanted["args"] = [wanted["args"][0], *wanted["args"][2:]]
        if is_forkable(wanted["args"]) and (pid := server().fork(wanted)):
            self.pid, self._child_created = pid, True
            self._close_pipe_fds(*(wanted[pipe + end] for pipe in ("p2c", "c2p", "err") for end in ("read", "write")))
        else:
            start_interpreter(self, *arguments)

    def spawn(path, command, descriptors):
        words = list(map(os.fsdecode, command))
        if words[-1] == OF_A_POOL:
            words = [sys.executable, *words[words.index("-c") :]]  # the flags before are those of this process
            if pid := server().fork(spawned(words, descriptors)):
                return pid
        return spawn_interpreter(path, command, descriptors)

    subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = execute_child, spawn


def spawned(command, descriptors):
    """The arguments of `Popen._execute_child` for what multiprocessing starts by `spawn`."""
    streams = dict.fromkeys(("p2cread", "c2pwrite", "errwrite"), -1)
    others = {"cwd": None, "env": None, "preexec_fn": None, "start_new_session": False, "process_group": -1}
    return USUAL | streams | others | {"args": command, "pass_fds": sorted(map(int, descriptors))}


def is_forkable(command):
    """Whether a command is `python -m` with one of MODULES or `python -c` with a `Forkable` program."""
    if not isinstance(command, list) or len(command) < 3 or command[0] != sys.executable:
        return False
    return (command[1] == "-m" and command[2] in MODULES) or (command[1] == "-c" and isinstance(command[2], Forkable))


def is_test_process(command):
    """Whether a command starts a test process of xdist."""
    return command[1:] == OF_XDIST[1:]


class Client:
    """The connection of a process to its fork server, which is its child.

    Args:
        channel: A socket to the fork server; requests and answers are one packet each.
        environment: The environment in which the fork server has imported the libraries.
        report: Called with the reason when an interpreter is started instead.
    """

    def __init__(self, channel, environment, report=lambda reason: None):
        self.channel, self.environment, self.state = move_up(channel), environment, inherited_state()
        self.report = report
        self.channel.settimeout(1800.0)  # a busy machine takes minutes to import the libraries
        self.lock = threading.Lock()

    def fork(self, wanted):
        """Start a fork as a child of this process.

        The fork server's child forks once more and exits. Its orphan becomes a child of this process, which is a
        subreaper meanwhile.

        Args:
            wanted: The arguments of `Popen._execute_child` by name.

        Returns:
            The process number, or 0 if an interpreter has to be started instead.
        """
        streams = [wanted["p2cread"], wanted["c2pwrite"], wanted["errwrite"]]
        fds = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        if not (request := self.request(wanted, fds)):
            return 0
        before = ctypes.c_int()
        with self.lock:
            libc.prctl(GET_SUBREAPER, ctypes.byref(before))
            libc.prctl(SUBREAPER, 1)
            try:
                socket.send_fds(self.channel, [request], [*fds, *wanted["pass_fds"]])
                pid = int(self.channel.recv(64) or 0)
            except ConnectionError:
                pid = 0
            except BaseException:
                self.channel.shutdown(socket.SHUT_RDWR)  # the next request would receive this one's answer
                raise
            finally:
                libc.prctl(SUBREAPER, before.value)
        if not pid:
            self.report("an interpreter was started instead of a fork: the fork server has failed")
        return pid

    def request(self, wanted, fds):
        """Encode a request for a process with these streams; empty if a fork would differ from what is wanted."""
        death, cwd = wanted["preexec_fn"], Path(os.fsdecode(wanted["cwd"] or "")).absolute()
        if isinstance(death, functools.partial) and death.func.__name__ == "bind_to_parent":
            death = int(death.args[0])
        variables = os.environ if wanted["env"] is None else wanted["env"]
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        path = [str(cwd / folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
        request = {"args": [os.fsdecode(word) for word in wanted["args"]], "env": env, "cwd": str(cwd), "path": path}
        request |= {"session": bool(wanted["start_new_session"]), "group": wanted["process_group"]}
        request |= {"targets": [0, 1, 2, *wanted["pass_fds"]], "death": 0 if callable(death) else death or 0}
        request["blocked"] = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        request["pool"] = wanted["args"][-1] == OF_A_POOL  # it ends with its parent by itself, and starts no others
        data = json.dumps(request).encode()
        obstacles = {
            "arguments of Popen": any(wanted[name] != value for name, value in USUAL.items()) or callable(death),
            "the thread": threading.current_thread() not in THREADS and not request["pool"],
            **{f"this process's {name}": value != self.state[name] for name, value in inherited_state().items()},
            "environment variables": import_environment(env) != import_environment(self.environment),
            "a sitecustomize.py": any(Path(folder, "sitecustomize.py").exists() for folder in path if folder != SITE),
            "the working directory": not cwd.is_dir(),
            "the length": len(data) >= MAX_REQUEST,
            "a terminal": any(map(os.isatty, fds)) and not is_test_process(wanted["args"]),
        }
        if hindrances := [name for name, there in obstacles.items() if there]:
            self.report(f"an interpreter was started instead of a fork, because of {', '.join(hindrances)}")
            return b""
        return data


def move_up(channel):
    """Give a socket a descriptor number that no test passes to a child process."""
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, 900))


def import_environment(environment):
    """The variables that libraries may read while they are imported."""
    return {name: value for name, value in environment.items() if not name.startswith(READ_WHEN_USED)}


def inherited_state():
    """What a process inherits from its parent, except descriptors, working directory, environment, blocked signals."""
    names = ("Tgid", "Umask", "Uid", "Gid")
    status = dict(line.split(":", 1) for line in Path("/proc/thread-self/status").read_text().splitlines())
    limits = {line[:26].rstrip(): line[26:] for line in Path("/proc/self/limits").read_text().splitlines()}
    others = {
        # without the two that glibc reserves: it sets their handlers when it first needs them
        "ignored signals": {n for n in signal.valid_signals() if int(status["SigIgn"], 16) >> (n - 1) & 1},
        "session": os.getsid(0),
        "process group": os.getpgrp(),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "network": str(Path("/proc/self/ns/net").readlink()),
        "processors": os.sched_getaffinity(0),
    }
    return {name: status[name] for name in names} | limits | others
