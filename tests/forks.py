"""Python processes for the tests without the seconds that an interpreter's imports cost.

    python tests/forks.py          a fork server, on the socket that is its standard input
    forks.install()                lets `subprocess.Popen` of this process use one

torch, MLflow and Prefect take an interpreter some five seconds of CPU time, and the tests start hundreds. A fork server
imports them once for each test process and forks. What a test gets is a process as any other: a child of the process
that asked for it (its intermediate parent ends at once, while the asking process is the subreaper), with its own
session, environment, signals, working folder, standard streams and exit status, and with its command and environment in
/proc. Processes that start others themselves (SPAWNERS) keep a fork server of their own.

Only known modules (`python -m MODULE`) are forked, and programs (`python -c`) whose environment has FORKED. Scripts and
everything out of the ordinary (a preexec_fn, another user, variables that libraries read when they are loaded) get an
interpreter of their own, and with STARLING_TESTS_FORK=0 everything does.
"""

import array
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# those that spend seconds on imports; what a subprocess of these imports is imported beforehand
MODULES = {
    "flows.cli.app",
    "mlflow",
    "training.evaluator",
    "training.exchange.daemon",
    "training.node",
    "training.parameter_server.server",
    "training.rank",
    "training.store.server",
    "training.supervise",
    "uvicorn",
}
FORKED = {"STARLING_TESTS_FORK": "1"}
SPAWNERS = {"-c", "flows.cli.app", "mlflow", "training.node", "training.rank", "training.supervise"}
IMPORTED = (
    "torch",
    "s3fs",
    "scipy.signal",
    "matplotlib.pyplot",
    "pandas",
    "alembic.command",
    "flask_cors",
    "uvicorn.main",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "flows.cli.app",
    "tasks.config",
    "training.evaluator",
    "training.exchange.daemon",
    "training.parameter_server.server",
    "training.rank",
    "training.store.server",
    "training.supervise",
)
# Prefect reads its settings when it is imported, which a process may do after it has set them
LATE, LATE_IMPORTED = "prefect", ("prefect.server.api.server", "prefect.task_runners", "prefect.artifacts")
# read when a library is loaded: a process that has another value is no fork
EARLY = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "TORCH_LOG",
    "CUDA_",
    "GLOO_",
    "MPL",
    "LC_",
    "LANG",
)
ROOM = 64 << 10
"""Bytes that a server keeps in its command line, for the commands and environments of its forks."""
_PDEATHSIG, _SUBREAPER, _GET_SUBREAPER, _SET_MM, _MM_MAP = 1, 36, 37, 35, 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_execute = subprocess.Popen._execute_child


def _early(environment):
    return {k: v for k, v in environment.items() if k.startswith(EARLY) and k != "PYTHONPATH"}


class Server:
    """A fork server, as a process that has it as its child sees it."""

    def __init__(self, channel, early):
        self.channel = channel
        self.early = early
        self.owner = os.getpid()
        self.lock = threading.Lock()

    @classmethod
    def start(cls, environment):
        """An interpreter that imports everything first.

        Args:
            environment: Its environment: one that names no test's folder.
        """
        ours, theirs = socket.socketpair()
        environment = environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])}
        with theirs:
            command = [sys.executable, __file__, " " * ROOM]
            process = subprocess.Popen(command, stdin=theirs, cwd=ROOT, env=environment | {"ROOM": " " * ROOM})
        server = cls(_put_away(ours), _early(environment))
        server.process = process
        return server

    @classmethod
    def fork(cls, early):
        """A server with all that this process, itself a fork, has imported; this process has no threads yet."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            return _put_away(theirs)
        theirs.close()
        return cls(_put_away(ours), early)

    def spawn(self, request, fds):
        """Ask for a fork.

        Returns:
            Its process number: it is a child of this process.

        Raises:
            OSError: The fork could not be set up as asked (a folder that is not there).
            EOFError: The server is gone.
        """
        before = ctypes.c_int()
        with self.lock:
            _libc.prctl(_GET_SUBREAPER, ctypes.byref(before))
            _libc.prctl(_SUBREAPER, 1)
            try:
                _send(self.channel, request, fds)
                answer, _ = _receive(self.channel)
            except OSError as error:
                raise EOFError from error
            except BaseException:
                self.channel.close()  # the answer would be taken for the next one's
                raise
            finally:
                _libc.prctl(_SUBREAPER, before.value)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), request["cwd"])
        return answer["pid"]


def _put_away(channel):
    """The same socket by a number that no child process is given a file by."""
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, 900))


def _send(channel, document, fds=()):
    data = json.dumps(document).encode()
    head = len(data).to_bytes(4, "big")
    channel.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    channel.sendall(data)


def _receive(channel):
    fds = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(4, socket.CMSG_SPACE(64 * fds.itemsize))
    if not head:
        raise EOFError
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    size, parts = int.from_bytes(head, "big"), b""
    while len(parts) < size:
        more = channel.recv(size - len(parts))
        if not more:
            raise EOFError
        parts += more
    return json.loads(parts), list(fds)


# the asking side


def install(environment):
    """Let `subprocess.Popen` of this process fork the known modules, from a server that the first of them starts.

    Args:
        environment: The server's: one that names no test's folder.
    """
    if sys.platform != "linux" or os.environ.get("STARLING_TESTS_FORK") == "0":
        return
    found, lock = [], threading.Lock()

    def server():
        with lock:
            if not found or found[0].owner != os.getpid() or found[0].channel.fileno() < 0:
                found[:] = [Server.start(environment)]
            return found[0]

    _intercept(server, threads=True)


def _intercept(server, threads=False):
    """Let Popen ask a server.

    Args:
        server: Gives it.
        threads: Whether any thread may: Linux tells a child of the end of the thread that started it, and a fork's is
            the main one. Of the code under test this must stay true.
    """

    def execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore, *user, session, group = rest
        usual = (executable, close_fds, shell, restore, *user) == (None, True, False, True, None, None, None, -1)
        bound = _death_signal(preexec_fn)
        here = threads or threading.current_thread() is threading.main_thread()
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        if usual and bound is not None and here and _known(args, environment):
            request = {"env": environment, "cwd": os.fsdecode(cwd or os.getcwd()), "targets": [0, 1, 2, *pass_fds]}
            request |= {"session": bool(session), "group": group, "bound": bound, **_inherited()}
            request["args"] = [os.fsdecode(word) for word in args]
            streams = [n if fd == -1 else fd for n, fd in enumerate((p2cread, c2pwrite, errwrite))]
            if pid := _ask(server(), request, [*streams, *pass_fds]):
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
                return
        _execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)

    subprocess.Popen._execute_child = execute


def _ask(server, request, fds):
    """The number of a new process; 0 if it needs an interpreter of its own."""
    shown = [*request["args"], *request["env"], *request["env"].values()]
    if sum(map(len, shown)) > ROOM // 2 or server.early != _early(request["env"]):
        return 0
    try:
        return server.spawn(request, fds)
    except EOFError:
        return 0


def _inherited():
    """What a process has from its parent, besides files and folders."""
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return {
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "umask": int(umask.split()[1], 8),
    }


def _death_signal(preexec_fn):
    """What a child is to be sent when its parent dies, 0 for nothing; None if the function does something else."""
    if preexec_fn is None:
        return 0
    known = isinstance(preexec_fn, functools.partial) and preexec_fn.func.__name__ == "bind_to_parent"
    return int(preexec_fn.args[0]) if known else None


def _known(args, environment):
    if not isinstance(args, list | tuple) or len(args) < 3 or os.fspath(args[0]) != sys.executable:
        return False
    return (args[1] == "-m" and args[2] in MODULES) or (args[1] == "-c" and FORKED.items() <= environment.items())


# the server's side


def serve(channel, early):
    """Fork as asked until nobody can ask any more.

    Returns:
        In a fork, what it was asked to be.
    """
    while True:
        try:
            request, fds = _receive(channel)
        except (EOFError, ConnectionError):
            os._exit(0)
        alive, end = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            os.close(end)
            os.read(alive, 1)  # until the middle one is dead, and the asking process this one's parent
            os.close(alive)
            return _begin(channel, early, request, fds)
        os.waitpid(middle, 0)
        for fd in (alive, end, *fds):
            os.close(fd)


def _begin(channel, early, request, fds):
    """Become what was asked for, and say so."""
    own = None
    if SPAWNERS & set(request["args"][1:3]):
        own = Server.fork(early)
        if isinstance(own, socket.socket):
            channel.close()
            _close_all([own.fileno()])
            return serve(own, early)
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        _send(channel, {"errno": error.errno})
        os._exit(1)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.umask(request["umask"])
    high = [os.dup2(fd, 512 + n) for n, fd in enumerate(fds)]
    keep = [channel.fileno(), *([own.channel.fileno()] if own else [])]
    for fd, target in zip(high, request["targets"], strict=True):
        os.dup2(fd, target, inheritable=True)
    _close_all([*keep, *request["targets"]])
    _set_signals(request)
    if request["bound"]:
        _libc.prctl(_PDEATHSIG, request["bound"])
    _set_environment(request)
    _send(channel, {"pid": os.getpid()})
    channel.close()
    if own:
        _intercept(lambda: own)
    return request


def _close_all(keep):
    before = 2
    for fd in [*sorted(fd for fd in keep if fd > 2), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(before + 1, fd)
        before = fd


def _set_signals(request):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as every interpreter does
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _set_environment(request):
    os.environ.clear()
    os.environ.update(request["env"])
    words = request["args"]
    _show([os.fsencode(w) for w in words], [os.fsencode(f"{k}={v}") for k, v in request["env"].items()])
    sys.orig_argv = list(words)
    sys.argv = [words[1], *words[3:]]
    added = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = ["" if words[1] == "-c" else os.getcwd(), *added, *_SITE]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        kept = {"encoding": old.encoding, "errors": old.errors}
        file = open(number, "r" if number == 0 else "w", closefd=False, **kept)  # noqa: SIM115
        file.reconfigure(line_buffering=old.line_buffering or file.isatty(), write_through=old.write_through)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    import numpy
    import torch

    numpy.random.seed()
    torch.seed()
    sys.meta_path.insert(0, _Late())


class _Late(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what was imported beforehand when it is first imported, and lets it read its settings then."""

    def __init__(self):
        self.modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == LATE}
        for name in self.modules:
            del sys.modules[name]

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == LATE else None

    def create_module(self, spec):
        self.spec = self.modules[LATE].__spec__
        return self.modules[LATE]

    def exec_module(self, module):
        module.__spec__ = self.spec
        sys.meta_path.remove(self)
        sys.modules.update(self.modules)
        import prefect.context
        import prefect.logging.configuration

        prefect.context.refresh_global_settings_context()
        prefect.logging.configuration.setup_logging(incremental=False)


def _show(words, environment):
    """Put a command and an environment where /proc shows them: over those of this process, which have room for it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code, data, stack = stat[23:25], stat[42:44], stat[25]
    begin, end, env_begin, env_end = (int(n) for n in stat[45:49])
    shown = [b"".join(w + b"\0" for w in text) for text in (words, environment)]
    for text, first, last in zip(shown, (begin, env_begin), (end, env_end), strict=True):
        assert len(text) < last - first
        ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)
    areas = [*code, *data, stat[44], _libc.sbrk(0), stack, begin, begin + len(shown[0]), env_begin]
    where = struct.pack("11QQII", *map(int, areas), env_begin + len(shown[1]), 0, 0, 0xFFFFFFFF)
    _libc.prctl(_SET_MM, _MM_MAP, where, ctypes.c_ulong(len(where)), 0)  # where it is not allowed, zeros follow


_SITE: list[str] = []


def main():
    """Import everything, then fork; a fork runs its module as the interpreter's own, and ends as an interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    added = {str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    _SITE[:] = [p for p in sys.path[1:] if p not in added]
    sys.path[0] = str(ROOT)
    channel = _put_away(socket.socket(fileno=os.dup(0)))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    early = _early(os.environ)
    del os.environ["ROOM"]
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    for name in IMPORTED:
        importlib.import_module(name)
    assert LATE not in sys.modules
    for name in LATE_IMPORTED:
        importlib.import_module(name)
    sys.argv = [""]
    gc.collect()
    gc.freeze()
    return serve(channel, early)["args"][1:3]


if __name__ == "__main__":
    import forks

    how, chosen = forks.main()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__, main.__annotations__ = __builtins__, {}
    if how == "-c":
        exec(compile(chosen, "<string>", "exec"), main.__dict__)
    else:
        if not hasattr(sys.modules.get(chosen), "__path__"):
            sys.modules.pop(chosen, None)
        runpy._run_module_as_main(chosen)
