"""The site of the documentation: built with warnings as errors, with the root's pages, the API and the linked files."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import starling

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.real_interpreter]


class Links(HTMLParser):
    """Collects what a page links to and loads."""

    def __init__(self):
        super().__init__()
        self.targets = set()

    def handle_starttag(self, tag, attrs):
        self.targets |= {value for name, value in attrs if name in ("href", "src") and value}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra docs is not installed: make setup")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_on_the_site(site):
    pages = [path.stem for path in (ROOT / "docs").glob("*.md")] + ["RESULTS", "CHANGELOG", "CONTRIBUTING"]
    assert all((site / page / "index.html").is_file() for page in pages)
    assert "Starling" in (site / "index.html").read_text(encoding="utf-8")
    assert not list(site.rglob("*.md"))
    assert not (site / "hooks.py").exists()
    assert not any((site / name).exists() for name in ("tables.py", "__pycache__"))


def test_links_between_pages_and_to_files_exist(site):
    missing = []
    for page in site.rglob("index.html"):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        for link in links.targets:
            path = re.sub(r"[?#].*", "", link)
            if path and not re.match(r"[a-z]+:", path) and not (page.parent / path).exists():
                missing.append((str(page.relative_to(site)), link))
    assert missing == []
    assert (site / "examples" / "tabular.py").is_file()  # own-model.md links to it


def test_pages_load_nothing_from_other_sites(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert (
        re.findall(
            r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*https?:', text
        )
        == []
    )


def test_the_api_has_every_public_name_and_kind(site):
    text = (site / "api" / "starling" / "index.html").read_text(encoding="utf-8")
    names = set(starling.__all__) - {"__version__"}
    assert [name for name in sorted(names) if f"starling.{name}" not in text] == []
    kinds = (site / "api" / "kinds" / "index.html").read_text(encoding="utf-8")
    assert all(
        f"<code>{kind}</code>" in kinds for kind in ("conformer", "ctc", "mfcc", "graph", "h-adpsgd", "librispeech")
    )
