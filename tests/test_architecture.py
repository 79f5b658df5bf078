"""Rules of the architecture: allowed imports, and forbidden calls."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("starling", "flows", "tasks", "training", "speech", "storage", "configurable")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TWICE = frozenset({"Hypothesis", "LanguageModel", "Level", "Report", "Utterance"})
"""Public class names that are still defined twice. Only remove names: a new class gets a name of its own."""
BLOCKED = ("prefect", "mlflow", "typer", "rich", "matplotlib", "espeakng_loader")

POOLS = {"ProcessPoolExecutor", "Pool", "Process"}

IMPORT_ALL = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Block())
for room in sys.argv[1].split(","):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        importlib.import_module(module.name)
rooms = {"flows", "tasks", "training", "speech", "storage", "configurable"}
print(",".join(sorted({name.split(".")[0] for name in sys.modules} & rooms)))
"""


def imported(rooms, blocked=BLOCKED):
    """Rooms that are loaded after every module of some rooms has been imported in a fresh process."""
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(rooms), ",".join(blocked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().split(",")


def test_training_speech_and_storage_need_neither_prefect_nor_mlflow_nor_a_terminal():
    assert imported(["training", "speech", "storage"]) == ["configurable", "speech", "storage", "training"]


@pytest.mark.parametrize(
    ("room", "used"),
    [("speech", ["configurable", "speech"]), ("storage", ["storage"]), ("configurable", ["configurable"])],
)
def test_a_lower_room_imports_no_other_than_the_lowest(room, used):
    assert imported([room]) == used


@pytest.mark.parametrize(
    "module", ["training.config", "tasks.config.pipeline", "training.job", "flows.deploy.deployments"]
)
def test_configurations_are_read_without_torch(module):
    script = f"import sys, {module}; print(sorted({{'torch', 'torchaudio', 'flashlight'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_a_configuration_is_parsed_and_described_without_torch():
    script = """
import sys
from tasks.config.pipeline import PipelineConfig, parse_config
train = {"strategy": {"kind": "bmuf", "tau": 8}, "augment": {"noise": {}}}
config = parse_config({"name": "a", "data": {"sources": [{"kind": "synthetic"}]}, "train": train})
config.model_dump(mode="json"), PipelineConfig.model_json_schema()
print(sorted({"torch", "torchaudio", "flashlight"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_the_import_contracts_hold():
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout


@functools.cache
def trees():
    """The syntax tree of every source file, by its path below the root."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def imported_packages(node):
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def dangers(node):
    """What a node of a syntax tree does that no source file may do."""
    yield from imported_packages(node) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    if not isinstance(node, ast.Call):
        return
    name, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.save"}:
        yield name
    if name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
        yield name
    if keywords.get("shell", "False") != "False":
        yield f"{name} with a shell"
    if name in {"np.load", "numpy.load", "np.save", "numpy.save"} and keywords.get("allow_pickle") != "False":
        yield f"{name} without allow_pickle=False"


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell():
    found = [(path, danger) for path, tree in trees().items() for node in ast.walk(tree) for danger in dangers(node)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "eval(x)",
        "os.system(x)",
        "torch.load(x)",
        "yaml.load(x)",
        "run(x, shell=True)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_dangers_are_found(code):
    assert len([danger for node in ast.walk(ast.parse(code)) for danger in dangers(node)]) == 1
    assert not [danger for node in ast.walk(ast.parse("np.load(x, allow_pickle=False)")) for danger in dangers(node)]


def forks(tree):
    """Calls of a source file that may fork."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
        if name in {"os.fork", "os.forkpty"}:
            yield name
        if name.endswith(("get_context", "set_start_method")):
            if arguments[:1] not in (["'spawn'"], ["'forkserver'"]):
                yield f"{name}({arguments}) must name 'spawn' or 'forkserver'"
        elif name.rpartition(".")[2] in POOLS and name.partition(".")[0] not in {"psutil"}:
            explicit = {keyword.arg for keyword in node.keywords} & {"mp_context", "context"}
            if not explicit and name.partition(".")[0] not in {"context", "ctx", "spawn", "_SPAWN"}:
                yield f"{name} uses the platform's default start method: give it a context"


def test_every_process_is_spawned():
    """Processes with open connections never fork: s3fs and Arrow threads do not survive it."""
    assert [(path, call) for path, tree in trees().items() for call in forks(tree)] == []


@pytest.mark.parametrize(
    "code", ["os.fork()", "get_context()", "multiprocessing.get_context('fork')", "Process()", "pool.Pool(2)"]
)
def test_forks_are_found(code):
    assert len(list(forks(ast.parse(code)))) == 1
    assert not list(forks(ast.parse("get_context('spawn'); ProcessPoolExecutor(2, mp_context=x); psutil.Process()")))


def test_modules_stay_readable():
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in trees()}
    assert {path: count for path, count in lines.items() if count > 350} == {}


def test_functions_stay_readable():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, functions)]
    assert len(found) > 3000
    assert [(path, node.name) for path, node in found if (node.end_lineno or 0) - node.lineno >= 60] == []


def test_no_public_class_name_is_defined_twice():
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    twice = {name for name, count in names.items() if count > 1}
    assert not twice - TWICE, "defined twice: rename one of each pair"
    assert not TWICE - twice, "defined only once by now: remove from TWICE"


def test_property_tests_share_the_profile_of_the_suite():
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("conftest.py", "test_architecture.py"):
            text = path.read_text(encoding="utf-8")
            for word in ("deadline=None", "derandomize=", "register_profile", "load_profile", "print_blob"):
                assert word not in text, f"{path} sets {word}: tests/conftest.py does, for all"


def test_every_source_file_has_room_in_the_mirror():
    assert all((ROOT / "tests" / room).is_dir() for room in ROOMS)
