"""Fixtures that every room's tests share."""

import atexit
import fcntl
import gc
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from hypothesis.internal.conjecture import providers

# Collection creates millions of objects that stay: garbage collection would scan them again and again.
gc.disable()

# A shell may start the tests with these ignored (nohup, a job in the background); children would inherit that.
if threading.current_thread() is threading.main_thread():
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    for number, usual in handlers.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)

# Two cores serve the whole suite: a test must not oversubscribe them with one thread pool per process.
# The others default to OMP_NUM_THREADS. Exchanges' daemons get them, so the fork server needs them, too.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# The tests start many interpreters, which would compile our modules again and again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Test processes share expensive results in this folder. The first process, which starts the others, creates it and
# removes it.
if "STARLING_TESTS_SHARED" not in os.environ:
    os.environ["STARLING_TESTS_SHARED"] = tempfile.mkdtemp(prefix="starling-tests-")
    atexit.register(shutil.rmtree, os.environ["STARLING_TESTS_SHARED"], ignore_errors=True)

# The settings of all property tests. There are no deadlines, since the machine may be busy. Inherited suites run as
# several tests. The phase that explains failures is left out: it takes minutes here. With CI set, all runs draw the
# same examples.
hypothesis.settings.register_profile(
    "starling",
    deadline=None,
    print_blob=True,
    phases=[phase for phase in hypothesis.Phase if phase != hypothesis.Phase.explain],
    derandomize=bool(os.environ.get("CI")),
    database=None if os.environ.get("CI") else hypothesis.settings.default.database,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.differing_executors],
)
hypothesis.settings.load_profile("starling")

# Hypothesis also draws constants of our sources, of those modules that happen to be imported. The examples would depend
# on the tests that run before, and each test process would parse hundreds of files: 5 s of CPU on a fresh clone.
providers._get_local_constants = lambda: providers._local_constants


def _load(name: str) -> ModuleType:
    """A module of tests/, which must not be on sys.path: its folders are named like the rooms."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist fork its test processes from an interpreter that has imported the libraries."""
    config.stash[gc_collect_iterations_key] = 1  # at the end, for errors in destructors: each one takes a second
    if config.getoption("dist", "no") != "no":
        install_forks("1")


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Import a test file in one process at a time: the first rewrites its assertions, the others read the result."""
    with collector.path.open() if isinstance(collector, pytest.Module) else nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pytest_collection_finish() -> None:
    """Exclude objects that test collection has created from garbage collection, which is rarer than by default.

    Tests that create many objects, such as syntax trees, would spend most of their time in it.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Switch forks off for tests marked `real_interpreter` or `gpu` and for fixtures that they use first."""
    real = any(item.get_closest_marker(name) for name in ("real_interpreter", "gpu"))
    with forks.switched_off() if real else nullcontext():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu`, or `gpu(2)`, without as many GPUs, and pretrained models without their library.

    Random numbers of a test do not depend on the tests before it, which are others in each run.
    """
    random.seed(item.nodeid)
    if (library := sys.modules.get("torch")) is not None:
        from devices.choice import seed_device

        used = library.device("cuda" if library.cuda.is_initialized() else "cpu")
        seed_device(used, random.getrandbits(32))
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("kind") in ("wav2vec2", "whisper"):
        pytest.importorskip("transformers")
    if (marker := item.get_closest_marker("gpu")) is not None:
        import torch

        needed, present = (*marker.args, 1)[0], torch.cuda.device_count() if torch.cuda.is_available() else 0
        if present < needed:
            pytest.skip(f"needs {needed} GPU(s), this machine has {present}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """After `-m gpu`, as `make test-gpu` runs them: what ran where, to paste."""
    if terminalreporter.config.option.markexpr == "gpu" and not hasattr(terminalreporter.config, "workerinput"):
        text = _load("gpu_summary")
        for line in text.summary(terminalreporter.stats, text.machine(), text.commit()):
            terminalreporter.write_line(line)


forks = _load("forks")


def install_forks(default: str) -> None:
    """Start Python processes by fork if STARLING_TESTS_FORK, or else the default, says so."""
    if sys.platform == "linux" and os.environ.get("STARLING_TESTS_FORK", default) != "0" and not forks.installed():
        forks.install(dict(os.environ))


install_forks("1" if "PYTEST_XDIST_WORKER" in os.environ else "0")
_load("support")
_load("gpu_summary")
_load("nist_tools")
s3_server = _load("s3").s3_server


# The files that take eight seconds or more, slowest first (pytest --durations=0). A file runs in one test process
# (--dist loadfile): if a slow one came last, the others would be idle.
SLOWEST = (
    "flows/test_end_to_end.py",
    "tasks/test_paused.py",
    "flows/test_init_cli.py",
    "tasks/test_token_pipelines.py",
    "test_architecture.py",
    "training/test_launch.py",
    "training/test_ring.py",
    "recognition/test_export.py",
    "test_docs.py",
    "tasks/test_training_run.py",
    "test_forks.py",
    "training/test_exchange_contract.py",
    "tasks/test_register.py",
    "training/test_exchange_faults.py",
    "speech/hmm/test_train.py",
    "known_issues/test_interrupted_creation_broke_mlflow_database.py",
    "known_issues/test_finished_command_aborted_at_exit.py",
    "flows/test_init_from_pretrained.py",
    "tasks/test_warm_starts.py",
    "training/test_coordinator_server.py",
    "training/test_trained_part.py",
    "training/test_engine.py",
    "flows/test_search_form.py",
    "training/test_loader_processes.py",
    "flows/test_search.py",
    "test_starts.py",
    "speech/hmm/test_graph_decoder.py",
    "known_issues/test_a_run_hung_when_its_prefect_server_died.py",
    "speech/test_models.py",
    "recognition/test_token_systems.py",
    "tasks/test_registry_moves.py",
    "speech/test_features_kaldi.py",
    "flows/test_serve_cli.py",
    "speech/test_pretrained_networks.py",
    "tasks/test_word_decoding.py",
    "recognition/test_frame_stream.py",
    "known_issues/test_a_late_learner_kept_untrained_weights.py",
    "starling/test_core.py",
    "tasks/test_search_report.py",
    "speech/test_streaming_models.py",
    "tasks/test_leases.py",
    "tasks/test_pretrained_training.py",
    "tasks/test_adapted_features.py",
    "speech/lm/test_estimation.py",
    "training/strategies/test_strategies.py",
    "training/test_exactly_once.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slowest files first, and mark as slow the variants of a test that repeat what others of it show."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(SLOWEST)))
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in tests.values():
        for item in repetitions(variants):
            item.add_marker("slow")


def repetitions(variants: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The variants of a test that the others make dispensable, for tests that must be fast.

    With several parameters every value of each remains, but not every combination. Of a test marked `variants(n)`, only
    n variants remain, spread evenly.
    """
    if (marker := variants[0].get_closest_marker("variants")) is not None:
        kept = {len(variants) * place // marker.args[0] for place in range(marker.args[0])}
        yield from (item for place, item in enumerate(variants) if place not in kept)
        return
    values: set[tuple[int, str]] = set()
    for item in variants:
        own = set(enumerate(item.callspec._idlist))  # type: ignore[attr-defined]
        if own <= values:
            yield item
        values |= own


def find_shared_data() -> Path | None:
    """The folder of real speech: $STARLING_SHARED_DATA, or shared/data beside the checkout; None without one."""
    given = os.environ.get("STARLING_SHARED_DATA")
    for folder in [Path(given)] if given else [Path(__file__).resolve().parents[2] / "shared" / "data"]:
        if (folder / "README.md").is_file():
            return folder
    return None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real human speech with transcripts; the test is skipped where there is none."""
    folder = find_shared_data()
    if folder is None:
        pytest.skip("no real speech here: set STARLING_SHARED_DATA to the folder that holds it")
    return folder


@pytest.fixture(autouse=True)
def wait_for_forwarding_threads(monkeypatch):
    """Wait for threads that still send to a test's MLflow, before the next test changes the environment."""
    yield
    for thread in threading.enumerate():
        if thread.name == "forward":
            thread.join(240.0)


@pytest.fixture
def tones_are_speech(monkeypatch):
    """Detect speech by energy by default: Silero VAD finds none in tones and noise."""
    from recognition import transcriber
    from speech.vad import EnergyConfig

    monkeypatch.setattr(transcriber, "default_vad", EnergyConfig)


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock of some modules: `clock(module, …)` gives a list whose only element is their time in seconds."""

    def give(*modules):
        now = [0.0]

        class Time:
            monotonic = staticmethod(lambda: now[0])

        for module in modules:
            monkeypatch.setattr(module, "time", Time)
        return now

    return give


@pytest.fixture
def two_threads():
    """Torch computes in two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data folder."""
    folder = tmp_path / "home"
    monkeypatch.setenv("STARLING_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture
def finished(monkeypatch):
    """A finished tiny run, in its own data folder; read only."""
    import support

    folder, run = support.finished()
    monkeypatch.setenv("STARLING_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return run
