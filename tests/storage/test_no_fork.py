"""Processes with open connections never fork: s3fs and Arrow threads do not survive it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for room in ("flows", "tasks", "training", "speech", "storage") for p in (ROOT / room).rglob("*.py"))
POOLS = {"ProcessPoolExecutor", "Pool", "Process"}


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
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert [(path, call) for path, tree in trees.items() for call in forks(tree)] == []


@pytest.mark.parametrize(
    "code", ["os.fork()", "get_context()", "multiprocessing.get_context('fork')", "Process()", "pool.Pool(2)"]
)
def test_forks_are_found(code):
    assert len(list(forks(ast.parse(code)))) == 1
    assert not list(forks(ast.parse("get_context('spawn'); ProcessPoolExecutor(2, mp_context=x); psutil.Process()")))
