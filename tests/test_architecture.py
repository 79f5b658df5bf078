"""Rules of the architecture: allowed imports, and forbidden calls."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("starling", "flows", "tasks", "training", "recognition", "speech", "storage", "devices", "configurable")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
BLOCKED = ("prefect", "mlflow", "typer", "rich", "matplotlib", "espeakng_loader")

POOLS = {"ProcessPoolExecutor", "Pool", "Process"}

IMPORT_ALL = """
import importlib, os, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is not installed here")

def import_all(*rooms):
    for room in rooms:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, room + "."):
            importlib.import_module(module.name)
        print(room, *sorted({{name.split(".")[0] for name in sys.modules}} & set({known})), flush=True)

sys.meta_path.insert(0, Block())
import torch
import_all("configurable")
if os.fork():
    os.wait()
    import_all("devices")
    from speech.models import ConformerConfig, WhisperConfig, build_model
    build_model(ConformerConfig(), 80, 5), WhisperConfig(source="x")
    print("models", *{{"transformers"}} & set(sys.modules), flush=True)
    import_all("speech", "recognition", "training")
else:
    import_all("storage")
"""
"""Prints the rooms that are loaded once every module of a room is imported, in an order in which each room may use all
earlier ones; storage, which may not use devices and speech, has a fork of its own. Between devices and speech, whether
a model has imported the library of pretrained ones."""


def printed(program):
    """The lines that a program prints in a new interpreter, by their first words, and its error output."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in done.stdout.splitlines()}, done.stderr


@functools.cache
def loaded_rooms():
    return printed(IMPORT_ALL.format(blocked=BLOCKED, known=ROOMS[1:]))


USED = {
    "training": "configurable devices recognition speech storage training",
    "recognition": "configurable devices recognition speech storage",
    "speech": "configurable devices speech",
    "storage": "configurable storage",
    "devices": "configurable devices",
    "configurable": "configurable",
}
"""Rooms of which every module is imported, and the rooms that are loaded then."""


@pytest.mark.parametrize("room", USED)
def test_lower_rooms_need_neither_prefect_nor_mlflow_nor_a_terminal_and_no_higher_rooms(room):
    loaded, said = loaded_rooms()
    assert loaded.get(room) == USED[room], said[-2000:]


def test_models_that_are_not_pretrained_do_not_import_the_library():
    loaded, said = loaded_rooms()
    assert loaded.get("models") == "", said[-2000:]


PARSE = """
import sys
from tasks.config.pipeline import PipelineConfig, parse_config
train = {"strategy": {"kind": "bmuf", "tau": 8}, "augment": {"noise": {}}}
config = parse_config({"name": "a", "data": {"sources": [{"kind": "synthetic"}]}, "train": train})
config.model_dump(mode="json"), PipelineConfig.model_json_schema()
"""
CONFIGURATIONS = {
    "training.config": "import training.config",
    "tasks.config.pipeline": "import tasks.config.pipeline",
    "training.job": "import training.job",
    "flows.deploy.deployments": "import flows.deploy.deployments",
    "parsed and described": PARSE,
}


@functools.cache
def loaded_libraries():
    """Which of torch and its kin each configuration, and those before it, have loaded."""
    parts = ["import sys"]
    for number, program in enumerate(CONFIGURATIONS.values()):
        parts += [program, f"print({number}, *{{'torch', 'torchaudio', 'flashlight'}} & set(sys.modules))"]
    return printed("\n".join(parts))[0]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_are_read_without_torch(name):
    assert loaded_libraries()[str(list(CONFIGURATIONS).index(name))] == ""


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


@functools.cache
def nodes():
    """Every node of every source file, each with the file's path, by its class."""
    by_kind = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            by_kind.setdefault(type(node), []).append((path, node))
    return by_kind


def found_by(find, *kinds):
    """What a function finds in the nodes of these classes, with their paths."""
    return [(path, detail) for kind in kinds for path, node in nodes().get(kind, ()) for detail in find(node)]


def dotted(node):
    """What is called, as it is written."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def imported_packages(node):
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def imported_at_once(module):
    """The files that import a module, or something from it, when they are imported themselves."""
    found = set()
    for path, tree in trees().items():
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(f"{name}.".startswith(f"{module}.") for name in names):
                found.add(path)
    return found


def test_numba_is_imported_only_where_lattices_are_searched():
    assert imported_at_once("numba") == {"speech/compiled.py"}
    assert imported_at_once("speech.compiled") == {"speech/hmm/compiled_lattice.py", "speech/hmm/lattice.py"}
    assert imported_at_once("speech.hmm.compiled_lattice") == {"speech/hmm/lattice.py"}
    # a benchmark aside, functions import it when they are called
    assert imported_at_once("speech.hmm.lattice") <= {"benchmarks/graph_decoding.py"}


def forbidden_calls(node):
    """What a node of a syntax tree does that no source file may do."""
    yield from imported_packages(node) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    if not isinstance(node, ast.Call):
        return
    name = dotted(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in ("shell", "allow_pickle")}
    if name in {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.save"}:
        yield name
    if name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
        yield name
    if keywords.get("shell", "False") != "False":
        yield f"{name} with a shell"
    if name in {"np.load", "numpy.load", "np.save", "numpy.save"} and keywords.get("allow_pickle") != "False":
        yield f"{name} without allow_pickle=False"


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell():
    assert found_by(forbidden_calls, ast.Import, ast.ImportFrom, ast.Call) == []


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
def test_forbidden_calls_are_detected(code):
    assert len([danger for node in ast.walk(ast.parse(code)) for danger in forbidden_calls(node)]) == 1
    assert not [
        danger for node in ast.walk(ast.parse("np.load(x, allow_pickle=False)")) for danger in forbidden_calls(node)
    ]


def forking_calls(call):
    """Why a call may fork, if it may."""
    name = dotted(call.func)
    if name in {"os.fork", "os.forkpty"}:
        yield name
    if name.endswith(("get_context", "set_start_method")):
        arguments = [ast.unparse(argument) for argument in call.args]
        if arguments[:1] not in (["'spawn'"], ["'forkserver'"]):
            yield f"{name}({arguments}) must name 'spawn' or 'forkserver'"
    elif name.rpartition(".")[2] in POOLS and name.partition(".")[0] not in {"psutil"}:
        explicit = {keyword.arg for keyword in call.keywords} & {"mp_context", "context"}
        if not explicit and name.partition(".")[0] not in {"context", "ctx", "spawn", "_SPAWN"}:
            yield f"{name} uses the platform's default start method: give it a context"


def test_every_process_is_spawned():
    """Processes with open connections never fork: s3fs and Arrow threads do not survive it."""
    assert found_by(forking_calls, ast.Call) == []


@pytest.mark.parametrize(
    "code", ["os.fork()", "get_context()", "multiprocessing.get_context('fork')", "Process()", "pool.Pool(2)"]
)
def test_forking_calls_are_detected(code):
    assert len(list(forking_calls(ast.parse(code).body[0].value))) == 1
    for fine in ("get_context('spawn')", "ProcessPoolExecutor(2, mp_context=x)", "psutil.Process()"):
        assert not list(forking_calls(ast.parse(fine).body[0].value))


def own_percent_signs(node):
    """Formats such as `.2%`, which write 9.00% and not 9.00 %."""
    yield from (
        [ast.unparse(node)]
        if isinstance(node.format_spec, ast.JoinedStr) and (ast.unparse(node.format_spec).rstrip("'\"").endswith("%"))
        else []
    )


def test_percentages_are_written_with_a_space():
    assert found_by(own_percent_signs, ast.FormattedValue) == []
    [wrong] = [part for part in ast.walk(ast.parse("f'{x:.1%} {x:.1f} %'")) if isinstance(part, ast.FormattedValue)][:1]
    assert list(own_percent_signs(wrong))


def test_functions_have_fewer_than_60_lines():
    functions = nodes()[ast.FunctionDef] + nodes().get(ast.AsyncFunctionDef, [])
    assert len(functions) > 3000
    assert [(path, node.name) for path, node in functions if (node.end_lineno or 0) - node.lineno >= 60] == []


def test_public_class_names_are_unique():
    names = Counter(node.name for _, node in nodes()[ast.ClassDef] if not node.name.startswith("_"))
    assert not {name for name, count in names.items() if count > 1}, "defined twice: rename one of each pair"


def test_property_tests_share_the_profile_of_the_suite():
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("conftest.py", "test_architecture.py"):
            text = path.read_text(encoding="utf-8")
            for word in ("deadline=None", "derandomize=", "register_profile", "load_profile", "print_blob"):
                assert word not in text, f"{path} sets {word}: tests/conftest.py does, for all"


def test_every_room_has_a_folder_of_tests():
    assert all((ROOT / "tests" / room).is_dir() for room in ROOMS)
