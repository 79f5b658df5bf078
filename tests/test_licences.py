"""The product is Apache-2.0: what the engine and the pipeline need brings no GPL, which only further extras may."""

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DUAL = {"text-unidecode": "Artistic License", "libcst": "MIT"}
"""Packages that are offered under the GPL or another licence, which we choose."""
UNSTATED = {"espeakng-loader": "GPL: eSpeak NG is inside"}
"""Licences that a package does not state."""


def needed(requirements):
    """Names of installed packages that requirements bring, directly or not; extras as they ask for them."""
    seen, waiting = set(), [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
        environments = [{"extra": extra} for extra in (requirement.extras or {""})]
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            further = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform
        seen.add(key)
        for line in further:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate(env) for env in environments):
                inner.marker = None
                waiting.append(inner)
    return {name for name, _ in seen}


def is_gpl(name):
    about = metadata.metadata(name)
    classifiers = [line for line in about.get_all("Classifier") or () if line.startswith("License ::")]
    stated = [about.get("License-Expression") or "", (about.get("License") or "")[:200], *classifiers]
    if name in UNSTATED:
        stated = [UNSTATED[name]]
    gpl = [line for line in stated if re.search(r"(?<![L])GPL|(?<!Lesser )General Public License", line)]
    lesser = [line for line in gpl if re.search(r"LGPL|Lesser", line)]
    return len(gpl) > len(lesser) and not any(DUAL.get(name, " no ") in line for line in stated)


def test_the_core_and_the_pipeline_need_nothing_under_the_gpl():
    core = needed(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["pipeline"])
    assert len(core) > 50
    assert sorted(name for name in core if is_gpl(name)) == []


def test_pretrained_encoders_need_nothing_under_the_gpl():
    pytest.importorskip("transformers")
    extra = needed(PROJECT["optional-dependencies"]["pretrained"])
    assert {"transformers", "tokenizers", "huggingface-hub"} <= {name.replace("_", "-") for name in extra}
    assert [name for name in extra if is_gpl(name)] == []


def test_gpl_licences_are_recognized():
    pytest.importorskip("espeakng_loader")
    extra = needed(PROJECT["optional-dependencies"]["espeak"])
    assert [name for name in extra if is_gpl(name)] == ["espeakng-loader"]


def test_espeak_is_imported_in_one_module_and_only_when_used():
    for room in ("flows", "tasks", "training", "recognition", "speech", "storage", "devices", "configurable"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "espeakng_loader" not in text:
                continue
            tree = ast.parse(text)
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            if any("espeakng_loader" in ast.unparse(node) for node in imports):
                assert path.relative_to(ROOT) == Path("speech/synthesis/espeak.py")
                assert not any("espeakng_loader" in ast.unparse(node) for node in tree.body if node in imports)
