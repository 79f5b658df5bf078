import json
import subprocess
from importlib import metadata

import torch

from tasks.tracking import provenance as module
from tasks.tracking.provenance import provenance


def test_provenance_names_version_commit_machine_and_libraries():
    found = provenance()
    assert found["version"] == metadata.version("starling")
    assert found["torch"] == torch.__version__
    assert found["commit"] == "unknown" or len(found["commit"].rstrip("+")) == 40
    assert all(found.values())
    json.dumps(found)


def test_without_git_the_commit_is_unknown(monkeypatch):
    def fail(*_):
        raise FileNotFoundError("git")

    monkeypatch.setattr(module, "_git", fail)
    assert module._commit() == "unknown"


def test_uncommitted_changes_are_marked(monkeypatch):
    answers = {"rev-parse": "a" * 40, "status": " M file.py"}
    monkeypatch.setattr(module, "_git", lambda folder, *words: answers[words[0]])
    monkeypatch.setattr(module.Path, "exists", lambda self: True)
    assert module._commit() == "a" * 40 + "+"
    answers["status"] = ""
    assert module._commit() == "a" * 40


def test_failing_git_is_tolerated(monkeypatch):
    def fail(*_):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(module, "_git", fail)
    assert module._commit() == "unknown"
