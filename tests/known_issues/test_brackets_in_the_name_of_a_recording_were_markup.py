"""The progress bar of `starling transcribe` read the name `[live].wav` as markup, and showed `.wav`."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli import transcribe


@pytest.mark.parametrize("name", ["[live].wav", "[bold].wav"])
def test_name_is_shown_as_it_is(monkeypatch, name):
    shown = io.StringIO()
    monkeypatch.setattr(transcribe, "err", Console(file=shown, force_terminal=True, width=120, color_system=None))
    with transcribe._progress(1) as (show, _, _):
        show(Path(name))
    assert f"{name} (0 s of audio done)" in shown.getvalue()
