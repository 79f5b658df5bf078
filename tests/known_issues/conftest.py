"""Fixtures of the regression tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

if "support" not in sys.modules:  # tests/ must not be on sys.path: its folders are named like the rooms
    _spec = importlib.util.spec_from_file_location("support", Path(__file__).resolve().parents[1] / "support.py")
    sys.modules["support"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["support"])


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
