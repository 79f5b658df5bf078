"""Two speakers who talk at once on one channel had 100 % errors without a word about it. sclite counts the same."""

import json

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from speech.scoring import ScoringRules, load_pairs

STM = "rec A ann 0.0 3.0 hello world\nrec A bob 0.5 2.0 good bye\n"
CTM = "rec A 0.1 0.3 hello\nrec A 0.6 0.4 good\nrec A 1.4 0.4 bye\nrec A 2.3 0.3 world\n"


def files(folder, stm, ctm=CTM):
    (folder / "ref.stm").write_text(stm)
    (folder / "hyp.ctm").write_text(ctm)
    return folder / "ref.stm", folder / "hyp.ctm"


@pytest.mark.parametrize(
    ("stm", "named"),
    [
        (STM, ["rec A: ann 0–3 s (line 1) and bob 0.5–2 s (line 2)"]),
        (STM.replace("A bob", "B bob"), []),
        ("rec A ann 0 1 a\nrec A bob 1 2 b\nrec A ann 1.996 3 c\n", []),  # rounded times
        (
            "rec A ann 0 9 a\nrec A bob 1 2 b\nrec A cid 3 4 IGNORE_TIME_SEGMENT_IN_SCORING\n",
            ["rec A: ann 0–9 s (line 1) and bob 1–2 s (line 2)", "rec A: ann 0–9 s (line 1) and cid 3–4 s (line 3)"],
        ),
    ],
)
def test_segments_at_the_same_time_are_named(tmp_path, stm, named):
    assert load_pairs(*files(tmp_path, stm), ScoringRules()).overlaps == named


def test_command_warns_and_counts_as_sclite(tmp_path):
    result = CliRunner().invoke(app, ["score", *map(str, files(tmp_path, STM)), "--json"])
    report = json.loads(result.stdout)
    assert report["overlaps"] == ["rec A: ann 0–3 s (line 1) and bob 0.5–2 s (line 2)"]
    said = " ".join(result.stderr.split())
    assert "warning: 1 pair of segments at the same time on one channel: rec A: ann" in said
    assert "give each speaker a channel of their own in both files" in said
    assert report["sets"]["hyp"]["wer"] == 1.0
