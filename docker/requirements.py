"""Print the requirements of this package and of the extras that are named, for a layer of the image without code."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = (project["optional-dependencies"][name] for name in sys.argv[1:])
for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
    print(line)
