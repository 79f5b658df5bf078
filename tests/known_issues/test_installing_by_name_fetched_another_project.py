"""The package index has another project named starling: messages and docs name a folder or a wheel to install."""

import re

import pytest
from support import ROOT

from configurable.extras import install_remedy

BY_NAME = re.compile(r"pip install\W+(?:-\S+\s+)*['\"]?starling\b")
FOLDERS = (
    "flows",
    "tasks",
    "training",
    "recognition",
    "speech",
    "storage",
    "configurable",
    "starling",
    "docs",
    "examples",
    "benchmarks",
)
FILES = [
    *ROOT.glob("*.md"),
    *(path for folder in FOLDERS for kind in ("py", "md", "ipynb") for path in (ROOT / folder).rglob(f"*.{kind}")),
]


def test_no_page_or_message_installs_by_name():
    pages = [path for path in FILES if BY_NAME.search(path.read_text(encoding="utf-8"))]
    assert not pages


@pytest.mark.parametrize(
    "text", ["pip install starling", "pip install 'starling[demo]'", "pip install \"\n  'starling[x]"]
)
def test_installing_by_name_is_recognized(text):
    assert BY_NAME.search(text)


def test_remedy_names_a_folder():
    assert install_remedy("espeak") == "pip install '.[espeak]' in Starling's source folder"
