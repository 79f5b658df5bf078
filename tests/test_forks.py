"""A fork looks and behaves like a process with a new interpreter."""

import functools
import json
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
from forks import Forkable
from support import ROOT, environment, processes_naming, slow_nodes, wait_until

from training.processes.children import bind_to_parent

pytestmark = pytest.mark.filterwarnings("ignore:an interpreter was started")

SHOW = """
import json, logging, os, random, signal, sys, tempfile, threading
state = open("/proc/self/status").read().splitlines()
print(json.dumps({
    "parent": os.getppid(), "leader": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "folder": os.getcwd(), "environment": dict(os.environ), "limits": open("/proc/self/limits").read(),
    "state": [line for line in state if line.startswith(("Umask", "SigBlk", "SigIgn", "Uid", "Gid", "NoNew"))],
    "argv": sys.argv, "words": sys.orig_argv[1:], "path": sys.path, "flags": str(sys.flags), "nice": os.nice(0),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "files": sorted(n for n in os.listdir("/proc/self/fd") if int(n) < 900 and n != "3"),
    "threads": threading.active_count(), "main": sorted(globals()), "logging": str(logging.root.handlers),
    "streams": [[f.encoding, f.errors, f.line_buffering, f.write_through] for f in (sys.stdin, sys.stdout, sys.stderr)],
    "folders": [tempfile.gettempdir(), os.path.expanduser("~")], "locale": __import__("locale").getlocale(),
    "hidden": "prefect" in sys.modules, "said": sys.stdin.read(),
    "shown": [open(f"/proc/self/{name}", "rb").read().decode() for name in ("cmdline", "environ")],
}))
"""
RANDOM = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1), numpy.__file__)"


@pytest.fixture(scope="module", autouse=True)
def server():
    """A fork server, also where forks are switched off."""
    with nullcontext() if forks.installed() else forks.switched_off():
        if not forks.installed():
            forks.install(dict(os.environ))
        yield


@pytest.fixture(params=[Forkable, str])
def python(request, tmp_path):
    """Starts `python -c`, in a fork or in an interpreter."""
    started = []

    def start(code, *words, **options):
        env = os.environ | {"STARLING_HERE": str(tmp_path)}
        command = [sys.executable, "-c", request.param(code), *words]
        started.append(subprocess.Popen(command, env=env, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def is_fork(**options):
    """Whether a process started with these options is a fork: it has libraries that its program does not import."""
    code = Forkable("import sys; sys.exit('torch' in sys.modules)")
    return subprocess.run([sys.executable, "-c", code], **options).returncode == 1


@pytest.mark.parametrize("session", [True, False])
def test_fork_sees_the_same_environment_as_an_interpreter(tmp_path, session):
    env = {**os.environ, "STARLING_X": "y", "PYTHONPATH": f"{ROOT}:relative"}
    options = {"cwd": tmp_path, "env": env, "input": "told", "capture_output": True, "text": True, "check": True}
    shown_by_each = []
    for kind in (str, Forkable):
        command = [sys.executable, "-c", kind(SHOW), "a", "b c", ""]
        shown_by_each.append(
            environment := json.loads(subprocess.run(command, start_new_session=session, **options).stdout)
        )
        assert environment["parent"] == os.getpid()
        assert "\0".join(environment["words"]) + "\0" in environment["shown"].pop(0)
        shown = environment["shown"].pop().rstrip("\0").split("\0")
        assert dict(entry.split("=", 1) for entry in shown) == env
    assert shown_by_each[0] == shown_by_each[1]


def test_forks_draw_different_random_numbers():
    command = [sys.executable, "-c", Forkable(RANDOM)]
    drawn = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert drawn[0][-1] == drawn[1][-1]
    assert not set(drawn[0][:-1]) & set(drawn[1][:-1])


def test_interpreter_is_started_for_what_a_fork_cannot_reproduce(tmp_path):
    assert is_fork()
    assert is_fork(preexec_fn=functools.partial(bind_to_parent, signal.SIGKILL))
    assert is_fork(env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})  # a node of one process leaves it behind
    assert not is_fork(preexec_fn=lambda: None)
    with pytest.warns(match="because of environment variables$"):
        assert not is_fork(env=os.environ | {"OMP_NUM_THREADS": "3"})
    assert not is_fork(env={name: value for name, value in os.environ.items() if name != "PATH"})
    assert not is_fork(umask=0o77)
    assert not is_fork(close_fds=False)
    assert not is_fork(env=os.environ | {"STARLING_LONG": "x" * forks.MAX_REQUEST})
    (tmp_path / "sitecustomize.py").touch()
    assert not is_fork(env=os.environ | {"PYTHONPATH": str(tmp_path)})
    with forks.switched_off():
        assert not is_fork()
    main, terminal = os.openpty()
    assert not is_fork(stdin=terminal)
    os.close(main)
    os.close(terminal)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(is_fork()))
    thread.start()
    thread.join()
    assert answers == [False]


def test_ranks_that_torchrun_starts_are_forks(monkeypatch):
    assert is_fork()
    monkeypatch.setattr(forks, "start_interpreter", None)
    command = (sys.executable, "-u", "-m", "training.coordinator.server", "--help")
    assert b"--listen" in subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout


def test_no_fork_if_inherited_state_differs_from_the_fork_servers():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, hard))
    try:
        assert not is_fork()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not is_fork()
    finally:
        signal.signal(signal.SIGHUP, before)
    mask = os.umask(0o77)
    try:
        assert not is_fork()
    finally:
        os.umask(mask)
    assert is_fork()


def test_an_interpreter_is_started_when_the_fork_server_has_died():
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    theirs.close()
    client = forks.Client(ours, dict(os.environ), warnings.warn)
    with forks.switched_off(), client.channel:
        forks.use(lambda: client)
        with pytest.warns(match="the fork server has failed"):
            assert not is_fork()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="not a test process of xdist")
@pytest.mark.skipif(os.environ.get("STARLING_TESTS_FORK") == "0", reason="forks are switched off")
def test_a_test_process_is_a_fork_that_imports_our_modules_from_the_checkout():
    assert {"Importer", "PrefectImporter"} & {type(finder).__name__ for finder in sys.meta_path}
    assert Path(sys.modules[bind_to_parent.__module__].__file__).is_relative_to(ROOT)


@pytest.mark.real_interpreter
def test_the_marker_switches_forks_off():
    assert not is_fork()


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('words')", 1, "words\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(5)", 5, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt\n"),
    ],
)
def test_exit_status_and_error_output_match(python, code, status, said):
    process = python(code, stderr=subprocess.PIPE)
    assert process.communicate(timeout=240)[1].endswith(said)
    assert process.returncode == status


def test_open_files_are_written_and_threads_awaited_at_exit(python, tmp_path):
    code = "import sys, threading, time; file = open(sys.argv[1], 'w'); file.write('words'); "
    code += "threading.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()"
    process = python(code, str(tmp_path / "file"), stdout=subprocess.PIPE)
    assert process.communicate(timeout=240)[0] == "done\n"
    assert (tmp_path / "file").read_text() == "words"


def test_output_that_cannot_be_written_at_exit_is_reported(python):
    code = "import sys; sys.stdout = open(1, 'w', closefd=False); print('words')"  # buffered, whatever the environment
    with open("/dev/full", "w") as full:
        process = python(code, stdout=full, stderr=subprocess.PIPE)
        assert process.communicate(timeout=240)[1].endswith("OSError: [Errno 28] No space left on device\n")
    assert process.returncode == 120


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_forks_and_interpreters(python, number):
    code = "import time; print(1, flush=True); time.sleep(600)"
    process = python(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(240) == -number
    process.stdout.close()


PARENT = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from forks import Forkable
code = "import os, sys, time; from training.processes.children import end_with_parent; "
code += "end_with_parent(int(sys.argv[1]));"
code += "print(os.getsid(0), os.getpgrp(), 'torch' in sys.modules, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", Forkable(code), str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_child_of_a_fork_shares_its_session_and_ends_with_it(python, tmp_path):
    options = {"stdout": subprocess.PIPE, "cwd": ROOT, "start_new_session": True}
    process = python(PARENT, str(ROOT / "tests"), **options)
    child, session, group, forked = process.stdout.readline().split()
    assert int(session) == int(group) == process.pid
    assert forked == str(isinstance(process.args[2], Forkable))
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(process.pid)
    assert {process.pid, int(child)} <= set(processes_naming(str(tmp_path)))
    process.kill()
    process.wait(240)
    process.stdout.close()
    wait_until(lambda: not processes_naming(str(tmp_path)))


def test_a_missing_working_directory_is_an_error(python, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        python("", cwd=tmp_path / "nowhere")


def test_passed_descriptors_keep_their_numbers(python):
    end, start = os.pipe()
    process = python("import os, sys; os.write(int(sys.argv[1]), b'here')", str(start), pass_fds=[start])
    os.close(start)
    with open(end, "rb") as pipe:
        assert pipe.read() == b"here"
    assert process.wait(240) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [str, Forkable])
def test_slow_nodes_are_slow_in_forks_and_interpreters(kind):
    code = "from training.node.worker import Worker; print(Worker.__init__.__name__)"
    command = [sys.executable, "-c", kind(code)]
    for factors, name in (({0: 2}, "make_slow"), ({}, "__init__")):
        done = subprocess.run(command, cwd=ROOT, env=os.environ | slow_nodes(factors), capture_output=True, text=True)
        assert done.stdout == name + "\n", done.stderr


def test_a_slow_learner_sleeps_in_proportion_to_its_work(monkeypatch):
    slept, clock = [], iter([10.0, 11.5, 11.5, 12.0, 12.0])
    with environment(STARLING_SLOW_NODES=""):
        slowed = runpy.run_path(str(Path(forks.SITE, "sitecustomize.py")))["slowed"]
    times = SimpleNamespace(sleep=slept.append, thread_time=lambda: next(clock))  # not those of other threads, too
    monkeypatch.setitem(slowed.__globals__, "time", times)
    gradient = slowed(lambda batch, seed: batch + seed, 4.0)
    assert [gradient(1, 2), gradient(3, 4), gradient(5, 6)] == [3, 7, 11]
    assert slept == [4.5, 1.5]


OF_ITSELF = """
[__import__("multiprocessing").parent_process().pid, __import__("os").getppid(), __import__("os").getcwd(),
 "torch" in __import__("sys").modules, __import__("signal").pthread_sigmask(0, ())]
"""


@pytest.mark.parametrize("forked", [True, False])
def test_processes_of_a_pool_are_forks_too(forked):
    with nullcontext() if forked else forks.switched_off():
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            task = pool.submit(eval, OF_ITSELF.strip())
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        with pool:
            assert task.result(240) == [os.getpid(), os.getpid(), os.getcwd(), forked, {signal.SIGUSR1}]


def test_killed_process_of_a_pool_is_detected():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pid = pool.submit(os.getpid).result(240)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            pool.submit(os.getpid).result(240)


FOUND = (
    "import sys, training.node.worker as w; print(w.__file__, w.__spec__.origin, len(sys.meta_path[0].modules) > 100)"
)


def test_forks_use_preimported_modules_of_the_checkout():
    command = [sys.executable, "-c", Forkable(FOUND)]
    words = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert words == [str(ROOT / "training" / "node" / "worker.py")] * 2 + ["True"]


OURS = """
import sys, tasks.config.pipeline
rooms = ("configurable", "devices", "storage", "speech", "recognition", "tasks")
print(sorted(name for name in sys.modules if name.split(".")[0] in rooms))
print("prefect" in sys.modules, "tasks.locking.leases" in sys.modules)
"""


def test_a_module_of_ours_is_imported_with_those_that_it_imports():
    options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
    programs = [Forkable(OURS), OURS, Forkable(OURS.replace("tasks.config.pipeline", "flows.pipeline"))]
    outputs = [subprocess.run([sys.executable, "-c", code], **options).stdout.splitlines() for code in programs]
    assert outputs[0] == outputs[1]
    assert "'configurable.choices'" in outputs[0][0]
    assert [modules[1] for modules in outputs] == ["False False", "False False", "True True"]


def test_a_module_of_ours_runs_as_main():
    command, options = (
        [sys.executable, "-m", "training.coordinator.server", "--help"],
        {"capture_output": True, "cwd": ROOT},
    )
    forked = subprocess.run(command, check=True, **options)
    with forks.switched_off():
        started = subprocess.run(command, check=True, **options)
    assert b"--listen" in forked.stdout
    assert (forked.stdout, forked.stderr) == (started.stdout, started.stderr)


def test_a_fork_prefers_modules_on_its_path_as_an_interpreter_does(python, tmp_path):
    for room in ("storage", "training"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("WHERE = 'elsewhere'")
    with environment(PYTHONPATH=str(tmp_path)):
        code = "import sys, storage, training; print(storage.WHERE, training.WHERE, 'storage.shards' in sys.modules)"
        process = python(code, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.communicate(timeout=240)[0] == "elsewhere elsewhere False\n"
