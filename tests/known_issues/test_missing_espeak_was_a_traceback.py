"""Without eSpeak NG, which is an extra, the demo ended in a bare ImportError; now it says what to install."""

import sys

import pytest

from flows.cli import doctor
from tasks.dataset.sources import SourceConfig
from tasks.stages.base import StageError
from tasks.stages.sources import open_source


@pytest.fixture
def without_espeak(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)


def test_synthetic_corpus_without_espeak_says_what_to_install(home, without_espeak):
    with pytest.raises(StageError, match=r"kind synthetic: .*GPL.*pip install '\.\[espeak\]'"):
        open_source(SourceConfig(kind="synthetic"))


def test_doctor_warns_of_missing_espeak(without_espeak):
    finding = doctor.check_audio()[-1]
    assert (finding.check, finding.state) == ("espeak-ng", "warning")
    assert finding.found.endswith("not installed (it is licensed under the GPL, so it is an extra)")
    assert "pip install '.[espeak]'" in finding.remedy
