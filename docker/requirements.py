"""Print the requirements of this package and of its `production` extra, for a layer of the image that has no code."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for line in (*project["dependencies"], *project["optional-dependencies"]["production"]):
    print(line)
