import json
import subprocess
from importlib import metadata
from types import SimpleNamespace

import torch

from tasks.tracking import provenance as module
from tasks.tracking.provenance import provenance, run_tags, version_tags


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


RUN = SimpleNamespace(run_id="a-run", store=SimpleNamespace(url="s3://bucket/objects"), flow_run_url="")


def test_tags_of_a_run_name_its_commit_and_whether_files_were_changed(monkeypatch):
    for commit, tags in {"c" * 40: ("c" * 40, "False"), "c" * 40 + "+": ("c" * 40, "True"), "unknown": ()}.items():
        monkeypatch.setattr(module, "provenance", lambda commit=commit: {"version": "1", "commit": commit})
        found = run_tags(RUN)
        assert found["starling.commit"] == commit
        assert tuple(found[name] for name in sorted(found) if name.startswith("mlflow.source.git")) == tags


def test_tags_of_a_run_name_its_objects_source_and_flow_run():
    found = run_tags(RUN)
    assert (found["starling.run"], found["starling.objects"]) == ("a-run", "s3://bucket/objects")
    assert found["mlflow.source.name"] == f"starling {metadata.version('starling')}"
    assert found["mlflow.source.type"] == "LOCAL"
    assert found["starling.torch"] == torch.__version__
    assert "prefect.flow_run" not in found
    flow = SimpleNamespace(**vars(RUN) | {"flow_run_url": "http://ui/1"})
    assert run_tags(flow) == found | {"prefect.flow_run": "http://ui/1"}
    assert set(version_tags(flow)) == {name for name in run_tags(flow) if not name.startswith("mlflow.")}
