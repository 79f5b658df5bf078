"""The public names: imported when they are used, and without the pipeline."""

import subprocess
import sys

import pytest
from support import ROOT

import starling


@pytest.mark.real_interpreter
def test_the_ring_needs_neither_speech_nor_the_pipeline():
    script = """
import sys, starling
assert "torch" not in sys.modules
assert starling.Ring and starling.RingConfig and starling.RingError
from starling import Ring
print(*sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    loaded = set(done.stdout.split())
    assert "training.ring.ring" in loaded, done.stderr[-2000:]
    assert not loaded & {"prefect", "mlflow", "recognition", "speech", "flows", "tasks", "training.config"}


def test_every_public_name_exists_and_others_do_not():
    assert all(getattr(starling, name) is not None for name in starling.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = starling.nothing
