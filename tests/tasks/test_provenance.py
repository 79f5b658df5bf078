import json
import subprocess
from importlib import metadata
from types import SimpleNamespace

import torch

from tasks.tracking import provenance as module
from tasks.tracking.provenance import provenance, run_tags, version_tags


def test_provenance_names_version_commit_machine_and_libraries():
    known = provenance()
    assert known["version"] == metadata.version("starling")
    assert known["torch"] == torch.__version__
    assert known["commit"] == "unknown" or len(known["commit"].rstrip("+")) == 40
    assert all(known.values())
    json.dumps(known)


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
        tags_of_run = run_tags(RUN)
        assert tags_of_run["starling.commit"] == commit
        assert tuple(tags_of_run[name] for name in sorted(tags_of_run) if name.startswith("mlflow.source.git")) == tags


def test_tags_of_a_run_name_its_objects_source_and_flow_run():
    tags = run_tags(RUN)
    assert (tags["starling.run"], tags["starling.objects"]) == ("a-run", "s3://bucket/objects")
    assert tags["mlflow.source.name"] == f"starling {metadata.version('starling')}"
    assert tags["mlflow.source.type"] == "LOCAL"
    assert tags["starling.torch"] == torch.__version__
    assert "prefect.flow_run" not in tags
    flow = SimpleNamespace(**vars(RUN) | {"flow_run_url": "http://ui/1"})
    assert run_tags(flow) == tags | {"prefect.flow_run": "http://ui/1"}
    assert set(version_tags(flow)) == {name for name in run_tags(flow) if not name.startswith("mlflow.")}
