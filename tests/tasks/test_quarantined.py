"""What a stage has quarantined is said when the stage ends: reasons, counts, the first names, and where all are."""

import pytest
from support import small_corpus

from tasks.config.pipeline import parse_config
from tasks.dataset.manifest import QUARANTINE
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.quarantined import examples_text, quarantine_lines
from tasks.stages.shard import SHARD


@pytest.fixture
def lines():
    said = []
    with progress.following(lambda *line: said.append(line)):
        yield said


def run_on(path):
    data = {"sources": [{"kind": "table", "path": str(path)}], "max_quarantined": 1}
    return Run(parse_config({"name": "q", "data": data}), "r")


def test_every_reason_is_announced_with_its_first_utterances(home, tmp_path, lines):
    path = small_corpus(tmp_path / "corpus")
    for n in range(3):
        (tmp_path / "corpus" / "audio" / f"s{n}-0.wav").write_bytes(b"noise")
    for n in range(4):
        (tmp_path / "corpus" / "audio" / f"s{n}-1.wav").unlink()
    result = PREPARE.execute(run_on(path))
    texts = [text for stage, text in lines if stage == "prepare"]
    assert texts[0] == result.line
    gone = tmp_path / "corpus" / "audio" / "s0-1.wav"
    assert texts[1].startswith(
        f"quarantined: 4 missing-audio: s0-1 (line 3 of metadata.csv: {gone} does not exist); s1-1 "
    )
    assert texts[1].endswith("; and 1 more")
    assert texts[2].startswith("quarantined: 3 unreadable: s0-0 (")
    assert "more" not in texts[2]
    assert texts[3:] == [f"all that are quarantined: {result.store.local_path(QUARANTINE)}"]


def test_nothing_is_announced_if_nothing_is_quarantined(home, tmp_path, lines):
    result = PREPARE.execute(run_on(small_corpus(tmp_path / "corpus")))
    assert lines == [("prepare", result.line)]


def test_utterance_that_can_no_longer_be_read_is_named_by_the_shard_stage(home, tmp_path, lines):
    run = run_on(small_corpus(tmp_path / "corpus"))
    PREPARE.execute(run)
    (tmp_path / "corpus" / "audio" / "s2-1.wav").unlink()
    lines.clear()
    result = SHARD.execute(run)
    _, (_, first), (_, last) = lines
    assert first.startswith("quarantined: 1 unreadable: s2-1 (")
    assert last == f"all that are quarantined: {result.store.local_path('done.json')}"


def test_damaged_table_of_quarantined_utterances_does_not_stop_a_run(home, tmp_path, lines):
    path = small_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "audio" / "s0-0.wav").write_bytes(b"noise")
    result = PREPARE.execute(run_on(path))
    result.store.write(QUARANTINE, b"damaged")
    assert quarantine_lines(result.output, result.record)[0] == "quarantined: 1 unreadable"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "a (why)"), (2, "a (why); b"), (4, "a (why); b; c; and 1 more"), (1004, "a (why); b; c; and 1,001 more")],
)
def test_first_examples_are_named_and_the_others_counted(count, text):
    examples = [("a", "why"), *((name, "") for name in "bcd")]
    assert examples_text(examples[:count], count) == text


def test_no_example_leaves_an_empty_text():
    assert examples_text([], 5) == ""
