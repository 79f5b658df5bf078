"""Print the requirements of this package and of the extras that are named, for a layer of the image without code."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(lines: list[str]) -> Iterator[str]:
    """Requirements, with those of our own extras in place of the extras."""
    for line in lines:
        if own := re.fullmatch(r"starling\[(.+)\]", line):
            for extra in own[1].split(","):
                yield from requirements(PROJECT["optional-dependencies"][extra])
        else:
            yield line


for line in dict.fromkeys(requirements([*PROJECT["dependencies"], f"starling[{','.join(sys.argv[1:])}]"])):
    print(line)
