"""A fork server: `python tests/fork_server.py FD …`, which `tests/forks.py` starts; FD is the socket of its channel."""

import atexit
import ctypes
import fcntl
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
import sys
import threading
import time
import types
from pathlib import Path

import forks

LIBRARIES = """
    torch.distributed.algorithms.ddp_comm_hooks torchaudio safetensors.torch scipy.sparse rapidfuzz.distance
    soundfile zmq.utils.monitor pandas pyarrow.parquet s3fs cryptography.hazmat.primitives.ciphers.aead
    matplotlib.pyplot alembic.command flask_cors uvicorn.main mlflow.pyfunc mlflow.store.tracking.sqlalchemy_store
    mlflow.store.model_registry.sqlalchemy_store prefect.server.api.server prefect.flows prefect.variables
"""
PDEATHSIG = 1


def serve(channel, environment):
    """Fork as asked until the process that asks has ended.

    Returns:
        In a fork, what it is to be.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the process that asks
    while True:
        data, fds, *_ = socket.recv_fds(channel, len(forks.ROOM), 64)
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
                return become(json.loads(data), fds, channel, environment)
            except BaseException:
                channel.send(b"0")
                raise
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def become(request, fds, channel, environment):
    """Take over what was asked for; a fork server of its own may be started here, and returns in its forks, too."""
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["args"][1] == "-c" or request["args"][2] in forks.SPAWNERS:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            channel.close()
            for fd in fds:
                os.close(fd)
            return serve(forks.put_away(theirs), environment)
        theirs.close()
        own = forks.Server(ours, environment)
        forks.use(lambda: own)
    os.chdir(request["cwd"])
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, request["targets"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    forks.libc.prctl(PDEATHSIG, request["death"])
    os.environ.clear()
    os.environ.update(request["env"])
    show(request["args"], [f"{name}={value}" for name, value in request["env"].items()])
    channel.send(str(os.getpid()).encode())
    channel.close()
    return request


def show(words, environment):
    """Put a command and an environment where /proc shows them: over those of the fork server, which have the room."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    begin, end, begin_environment, end_environment = map(int, places)
    for text, first, last in ((words, begin, end), (environment, begin_environment, end_environment)):
        shown = b"".join(os.fsencode(word) + b"\0" for word in text)
        ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


class Prefect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports Prefect in a fork: it reads its settings then, and some code asks whether it has been imported."""

    def __init__(self):
        self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "prefect"}

    def find_spec(self, name, *_):
        return importlib.machinery.ModuleSpec(name, self) if name == "prefect" else None

    def create_module(self, spec):
        self.spec = self.modules["prefect"].__spec__
        return self.modules["prefect"]

    def exec_module(self, module):
        module.__spec__ = self.spec
        sys.meta_path.remove(self)
        sys.modules.update(self.modules)
        importlib.import_module("prefect.context").refresh_global_settings_context()


def leave_libraries(libraries):
    """Keep the interpreter from taking down thousands of modules at its end: that costs a fork half a second."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(libraries))
    for name in libraries:
        sys.modules.pop(name, None)


def main(channel):
    """Import the libraries, then fork; a fork runs its module or program as an interpreter does."""
    del os.environ["ROOM"]
    site, environment, libraries = sys.path[1:], dict(os.environ), {}
    atexit.register(leave_libraries, libraries)  # called after all that libraries register
    for name in LIBRARIES.split():
        importlib.import_module(name)
    inspect.getmodule(main.__code__)  # makes a list of all modules, which pydantic wants
    assert threading.active_count() == 1, threading.enumerate()
    assert not logging.root.handlers, logging.root.handlers
    assert forks.early(os.environ) == forks.early(environment), set(os.environ.items()) ^ set(environment.items())
    libraries |= {n: m for n, m in sys.modules.items() if n.split(".")[0] not in {*sys.stdlib_module_names, "forks"}}
    sys.meta_path.insert(0, Prefect())
    gc.collect()
    gc.freeze()
    request = serve(forks.put_away(channel), environment)
    words = sys.orig_argv = request["args"]
    sys.argv = [words[1], *words[3:]]
    sys.path[:] = ["" if words[1] == "-c" else os.getcwd(), *request["path"], *site]
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[1] == "-m":
        runpy._run_module_as_main(words[2])
    else:
        module.__builtins__, module.__annotations__ = __builtins__, {}
        module.__loader__ = importlib.machinery.BuiltinImporter
        exec(compile(words[2], "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
