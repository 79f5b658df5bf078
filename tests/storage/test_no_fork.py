"""Processes with open connections never fork: s3fs and Arrow threads do not survive it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for room in ("flows", "tasks", "training", "speech", "storage") for p in (ROOT / room).rglob("*.py"))
POOLS = {"ProcessPoolExecutor", "Pool", "Process"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_process_is_spawned(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), [ast.unparse(a) for a in node.args]
        assert name not in {"os.fork", "os.forkpty"}, f"{path}: {name}"
        if name.endswith(("get_context", "set_start_method")):
            assert arguments, f"{path}: {name} must name 'spawn' or 'forkserver'"
            assert arguments[0] in {"'spawn'", "'forkserver'"}, f"{path}: {name}({arguments[0]})"
        elif name.rpartition(".")[2] in POOLS and name.partition(".")[0] not in {"psutil"}:
            explicit = {keyword.arg for keyword in node.keywords} & {"mp_context", "context"}
            context = name.partition(".")[0] in {"context", "ctx", "spawn", "_SPAWN"}
            assert explicit or context, f"{path}: {name} uses the platform's default start method: give it a context"
