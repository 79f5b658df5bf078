"""Lets the tests of this folder import its modules: the folder is not on sys.path, as tests/ is not."""

import importlib.util
import sys
from pathlib import Path

for _name, _file in {"hmm_toys": "toys.py", "lattice_in_numpy": "lattice_in_numpy.py"}.items():
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(_file))
        assert _spec is not None
        assert _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
