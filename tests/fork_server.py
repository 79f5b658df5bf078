"""A fork server: an interpreter that imports the libraries and our own modules once and forks on request.

Started by tests/forks.py as `python tests/fork_server.py FD PADDING`; FD is the socket of its channel.
"""

import atexit
import builtins
import copy
import ctypes
import fcntl
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
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
import warnings
import weakref
from pathlib import Path
from unittest import mock

import forks

ROOT = str(Path(__file__).resolve().parents[1])
ROOMS = ("configurable", "devices", "storage", "speech", "recognition", "training", "tasks", "flows")
"""Packages of ours."""
RUN_BY_FORKS = (
    *("flows/__init__.py", "flows/cli/", "flows/servers/", "tasks/tracking/pyfunc_model.py"),
    "recognition/standalone/",  # onnxruntime starts a thread
)
"""Modules that change the process, such as its environment, when they are imported, and those that import these."""
LIBRARIES = """
    torch._dynamo torch.distributed.algorithms.ddp_comm_hooks torchaudio safetensors.torch scipy.sparse
    rapidfuzz.distance soundfile zmq.utils.monitor pandas pyarrow.parquet s3fs
    cryptography.hazmat.primitives.ciphers.aead matplotlib.pyplot alembic.command flask_cors uvicorn.main mlflow.pyfunc
    mlflow.store.tracking.sqlalchemy_store mlflow.store.model_registry.sqlalchemy_store prefect.server.api.server
    prefect.flows prefect.variables
"""
OPTIONAL = ("transformers.models.wav2vec2.modeling_wav2vec2", "transformers.models.whisper.modeling_whisper")
"""Imported where their package is installed."""
HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25


def serve(channel, environment):
    """Fork on request until the client exits.

    Returns:
        In a fork, its request.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the client handles Ctrl-C
    while True:
        data, fds, *_ = socket.recv_fds(channel, forks.MAX_REQUEST, 64)
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:  # until this process is the client's child
                time.sleep(0.0005)
            try:
                return become(json.loads(data), fds, channel, environment)
            except BaseException:
                channel.send(b"0")
                raise
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def become(request, fds, channel, environment):
    """Turn this process into the requested one and tell the client.

    Returns:
        The request; in forks of this process's own fork server, theirs.
    """
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    if not request["pool"] and (request["args"][1] == "-c" or request["args"][2] in forks.STARTERS):
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            channel.close()
            for fd in fds:
                os.close(fd)
            return serve(forks.move_up(theirs), environment)
        theirs.close()
        report = [warnings.warn] if forks.is_test_process(request["args"]) else []
        client = forks.Client(ours, environment, *report)
        forks.use(lambda: client)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["cwd"])
    place(fds, request["targets"])
    forks.libc.prctl(forks.PDEATHSIG, request["death"])
    os.environ.clear()
    os.environ.update(request["env"])
    show(request["args"], [f"{name}={value}" for name, value in request["env"].items()])
    channel.send(str(os.getpid()).encode())
    channel.close()
    return request


def place(fds, targets):
    """Give descriptors the numbers that they have in the requested process."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for fd in fds]  # no descriptor is overwritten by another
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


def show(command, environment):
    """Show a command line and an environment in /proc, where tests look for processes.

    They overwrite the fork server's own, whose padding makes room for them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    start, end, start_environment, end_environment = map(int, fields)
    for words, first, last in ((command, start, end), (environment, start_environment, end_environment)):
        shown = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


def own_files():
    """Files of our own modules that forks need not run again."""
    for room in ROOMS:
        for file in sorted(Path(ROOT, room).rglob("*.py")):
            if file.stem != "__main__" and not str(file.relative_to(ROOT)).startswith(RUN_BY_FORKS):
                yield file


def name_of(file):
    """A module's name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def build_models():
    """Build our Pydantic models, of which some are otherwise built when they are first used, by each fork."""
    models = [sys.modules["pydantic"].BaseModel]
    while models:
        model = models.pop()
        models += model.__subclasses__()
        if model.__module__.split(".")[0] in ROOMS:
            model.model_rebuild(raise_errors=False)


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hides our own modules until a fork imports them, with those that each imports, as an interpreter would.

    They are those of the checkout; a fork that finds another checkout first on its path imports that.
    """

    def __init__(self):
        self.imports, before = {}, (list(sys.path), builtins.__import__)
        sys.path.insert(0, ROOT)
        builtins.__import__ = self.note_imports
        flows = importlib.util.find_spec("flows")
        sys.modules["flows"] = importlib.util.module_from_spec(flows)  # it changes signal handlers: for forks to run
        for name in map(name_of, own_files()):
            importlib.import_module(name)
        build_models()
        del sys.modules["flows"]
        sys.path[:], builtins.__import__ = before
        self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ROOMS}
        self.specs = {name: module.__spec__ for name, module in self.modules.items()} | {"flows": flows}
        sys.path_importer_cache.clear()

    def note_imports(self, name, names=None, values=None, wanted=(), level=0):
        """Import a module and note which of ours imported which of ours, or Prefect."""
        module = importlib.__import__(name, names, values, wanted, level)
        importer = (names or {}).get("__name__", "")
        if importer.split(".")[0] in ROOMS and name.split(".")[0] in {*ROOMS, "prefect"}:
            imported = [name, *(f"{name}.{part}" for part in wanted or ())]
            imported += ["prefect.main"] if name == "prefect" and wanted else []
            self.imports.setdefault(importer, []).extend(module for module in imported if module in sys.modules)
        return module

    def find_spec(self, name, *_):
        if name in ROOMS and not self.is_found(name):
            sys.meta_path.remove(self)
            return None
        if name not in self.modules:
            return None
        spec = copy.copy(self.specs[name])
        spec.loader = self
        return spec

    def is_found(self, room):
        """Whether an interpreter with this path would import the room from the checkout."""
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(room, None)) is not None:
                return spec.origin == self.specs[room].origin
        return False

    def create_module(self, spec):
        return self.modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__name__]
        names = dict(vars(module))
        for name in self.imports.get(module.__name__, ()):
            importlib.import_module(name)
        vars(module).update(names)  # a package's function may have the name of a submodule, bound to it by the import

    def get_code(self, name):
        """A module's code, which `python -m` asks for to run it as __main__."""
        return self.specs[name].loader.get_code(name)


class PrefectImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hides Prefect until a fork imports it, and then makes it read its settings.

    Prefect reads settings while it is imported, and some code checks whether Prefect is in sys.modules. Its module that
    configures logging runs again, in the fork.
    """

    def __init__(self):
        del sys.modules["prefect.main"]
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


def keep_libraries(libraries):
    """Skip the finalization of library modules at exit: it costs a fork half a second of CPU."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(libraries))
    for name in libraries:
        sys.modules.pop(name, None)


def import_libraries():
    """Import the libraries, with everything that forks need not compute again."""
    environment, libraries = dict(os.environ), {}
    atexit.register(keep_libraries, libraries)  # registered first, so called last
    gc.disable()
    for name in LIBRARIES.split():
        importlib.import_module(name)
    with mock.patch.dict(os.environ):  # scikit-learn, which transformers imports, sets variables
        for name in OPTIONAL:
            if importlib.util.find_spec(name.split(".")[0]):
                importlib.import_module(name)
    finders = list(sys.meta_path)
    with mock.patch("prefect.logging.configuration.setup_logging"):
        importlib.import_module("prefect.main")
    sys.meta_path[:] = finders
    # MLflow reads the metadata of all installed packages when a model is first logged or loaded
    importlib.import_module("mlflow.utils.requirements_utils")._init_packages_to_modules_map()
    # it evaluates strings at exit, after which Python ends an interrupted process with status 1 instead of the signal
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    for finalizer in list(weakref.finalize._registry):
        if finalizer.peek()[1] is sys.modules["torch.library"]._del_library:  # it takes a fork 0.05 s to end
            finalizer.atexit = False
    schemas = sys.modules["mlflow.store.db.utils"]
    schemas._get_latest_schema_revision = functools.cache(schemas._get_latest_schema_revision)  # it imports 60 scripts
    schemas._get_latest_schema_revision()
    ours = Importer()
    inspect.getmodule(import_libraries.__code__)  # inspect caches the files of all modules, which pydantic asks for
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    # forks lack all threads but one; Arrow's allocator restarts its own
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, threads
    assert not logging.root.handlers, logging.root.handlers
    early = forks.import_environment(os.environ), forks.import_environment(environment)
    assert early[0] == early[1], set(early[0].items()) ^ set(early[1].items())
    kept = {*sys.stdlib_module_names, "__main__", "forks"}
    libraries |= {name: module for name, module in sys.modules.items() if name.split(".")[0] not in kept}
    sys.meta_path[:0] = [PrefectImporter(), ours]
    gc.collect()
    gc.freeze()  # forks share these objects with this process, and need not scan them
    gc.enable()
    use_huge_pages()


def use_huge_pages():
    """Move memory to huge pages, of which a fork copies fewer entries: it takes 0.02 s of CPU instead of 0.06.

    A kernel older than 6.1 refuses, and everything stays as it is.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, file = line.split()[:5]
        first, last = (int(end, 16) for end in span.split("-"))
        first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and file == "0" and first < last:
            forks.libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def run(request, site):
    """Run the requested module or program as an interpreter does.

    Args:
        request: What the client asked for.
        site: The entries of sys.path that every interpreter has.
    """
    command = sys.orig_argv = request["args"]
    sys.argv = [command[1], *command[3:]]
    sys.path[:] = [
        "" if command[1] == "-c" else str(Path.cwd()),
        *request["path"],
        *(folder for folder in site if folder not in request["path"]),
    ]
    forks.libc.on_exit(forks.libc._exit, None)  # skips the destructors of libraries: torch's take 0.3 s of CPU
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()
    if forks.SITE in request["path"]:
        runpy.run_path(str(Path(forks.SITE, "sitecustomize.py")))
    module, status = types.ModuleType("__main__"), 0
    sys.modules["__main__"] = module
    try:
        if command[1] == "-m":
            runpy._run_module_as_main(command[2])
        else:
            module.__builtins__, module.__annotations__ = __builtins__, {}
            module.__loader__ = importlib.machinery.BuiltinImporter
            exec(compile(command[2], "<string>", "exec"), module.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    leave(module, status)


def leave(module, status):
    """Exit as an interpreter does, except that imported modules are not cleared: this costs 0.1 s of CPU.

    Args:
        module: The program, whose files are closed.
        status: Exit status.
    """
    threading._shutdown()
    atexit.unregister(keep_libraries)
    atexit._run_exitfuncs()
    vars(module).clear()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except (OSError, ValueError):
                raise SystemExit(status) from None  # the interpreter reports it
    os._exit(status & 0xFF)


if __name__ == "__main__":
    del os.environ["PADDING"]
    site, environment = sys.path[1:], dict(os.environ)
    channel = forks.move_up(socket.socket(fileno=int(sys.argv[1])))
    import_libraries()
    run(serve(channel, environment), site)
