"""Lets the tests of this folder import `hmm_toys`: the folder is not on sys.path, as tests/ is not."""

import importlib.util
import sys
from pathlib import Path

if "hmm_toys" not in sys.modules:
    spec = importlib.util.spec_from_file_location("hmm_toys", Path(__file__).with_name("toys.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["hmm_toys"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["hmm_toys"])
