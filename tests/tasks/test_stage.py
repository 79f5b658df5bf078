import json
import re
import threading
from pathlib import Path

import pytest
from support import tiny_document

from tasks.config.home import home as data_folder
from tasks.config.home import mlflow_uri, objects_url
from tasks.config.pipeline import parse_config
from tasks.stages import base, progress
from tasks.stages.base import STAGES, Run, Stage, StageError, get_stage


class Counting:
    """A stage whose output is one object; it counts how often it worked."""

    def __init__(self, name="prepare", **options):
        self.times = 0
        self.config = {"x": 1}
        self.fail = False
        self.stage = Stage(name, 1, lambda run: (self.config, {}), self.work, **options)

    def work(self, run, output):
        self.times += 1
        output.store.write("part", b"1")
        if self.fail:
            raise StageError("broken")
        output.store.write("whole", str(self.times).encode())
        return {"counts": {"times": self.times}}


def a_run(force_from="", **fields):
    return Run(parse_config(tiny_document(**fields)), "r", force_from)


def test_work_is_done_once_and_then_cached(home):
    counting = Counting()
    first, second = counting.stage.execute(a_run()), counting.stage.execute(a_run())
    assert (first.cached, second.cached, counting.times) == (False, True, 1)
    assert first.record == second.record
    assert first.counts == {"times": 1}
    assert second.store.read("whole") == b"1"
    assert json.loads(json.dumps(first.to_dict()))["record"]["stage"] == "prepare"


def test_address_depends_on_configuration_inputs_and_version(home):
    def key(version=1, config=1, digest="a"):
        return Stage("shard", version, lambda run: ({"c": config}, {"i": digest}), lambda *_: {}).output(a_run()).key

    assert len({key(), key(version=2), key(config=2), key(digest="b")}) == 4
    assert key() == key()


def test_failed_stage_publishes_nothing_and_a_rerun_completes_it(home):
    counting = Counting()
    counting.fail = True
    with pytest.raises(StageError):
        counting.stage.execute(a_run())
    assert counting.stage.output(a_run()).record() is None
    counting.fail = False
    assert not counting.stage.execute(a_run()).cached
    assert counting.stage.execute(a_run()).cached


def test_forced_stage_restarts_from_scratch_without_earlier_stages(home):
    early, late = Counting("prepare"), Counting("score")
    for counting in (early, late):
        counting.stage.execute(a_run())
    counting.stage.output(a_run()).store.write("leftover", b"")
    forced = a_run(force_from="train")
    assert early.stage.execute(forced).cached
    result = late.stage.execute(forced)
    assert (result.cached, late.times) == (False, 2)
    assert "leftover" not in result.store.list()


def test_failed_forced_stage_leaves_no_earlier_record(home):
    counting = Counting()
    counting.stage.execute(a_run())
    counting.fail = True
    with pytest.raises(StageError):
        counting.stage.execute(a_run(force_from="prepare"))
    assert counting.stage.output(a_run()).record() is None


def test_list_of_stages_names_what_the_files_declare():
    assert tuple(get_stage(name).name for name in STAGES) == STAGES
    files = Path(base.__file__).parent.glob("*.py")
    declared = {path.stem for path in files if re.search(r"^[A-Z]+ = Stage\(", path.read_text(), re.MULTILINE)}
    assert declared == set(STAGES)
    with pytest.raises(StageError, match="'preparation' is not a stage; stages are: prepare, shard"):
        get_stage("preparation")


@pytest.mark.parametrize("stage", STAGES)
def test_force_applies_to_the_stage_and_all_later_ones(stage):
    run = a_run(force_from=stage)
    assert [name for name in STAGES if run.forced(name)] == list(STAGES[STAGES.index(stage) :])
    assert not any(a_run().forced(name) for name in STAGES)


def test_output_with_invalid_record_is_made_again(home):
    valid = []
    counting = Counting(still_valid=lambda run, record: bool(valid))
    counting.stage.execute(a_run())
    assert not counting.stage.execute(a_run()).cached
    valid.append(True)
    assert counting.stage.execute(a_run()).cached


def test_one_of_two_concurrent_runs_works_and_both_get_the_result(home):
    entered, go = threading.Event(), threading.Event()
    calls = []

    def work(run, output):
        calls.append(run.run_id)
        entered.set()
        assert go.wait(240)
        return {}

    stage = Stage("prepare", 1, lambda run: ({}, {}), work)
    results = []
    threads = [threading.Thread(target=lambda: results.append(stage.execute(a_run()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(240)
    go.set()
    for thread in threads:
        thread.join(240)
    assert len(calls) == 1
    assert sorted(result.cached for result in results) == [False, True]


def test_progress_reaches_listeners_only():
    heard = []
    progress.report("train", 1, 2, "unheard")
    with progress.listening(lambda *given: heard.append(given)), progress.listening(lambda *_: None):
        progress.report("train", 1, 2, "note")
    progress.report("train", 2, 2)
    assert heard == [("train", 1, 2, "note")]


def test_end_of_a_stage_is_told_whether_made_found_or_failed(home):
    counting, ended = Counting(), []
    with progress.ending(ended.append):
        counting.stage.execute(a_run())
        counting.stage.execute(a_run())
        counting.config, counting.fail = {"x": 2}, True
        with pytest.raises(StageError, match="broken"):
            counting.stage.execute(a_run())
    counting.fail = False
    counting.stage.execute(a_run())
    assert ended == ["prepare"] * 3


def test_paths_below_the_data_folder(home, monkeypatch):
    assert data_folder() == home.resolve()
    assert data_folder().is_dir()
    assert objects_url("") == str(home.resolve() / "objects")
    assert objects_url("s3://bucket") == "s3://bucket"
    assert mlflow_uri() == f"sqlite:///{home.resolve()}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert mlflow_uri() == "http://localhost:1"


def test_relative_data_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STARLING_HOME", "here")
    assert data_folder() == tmp_path.resolve() / "here"


def test_stage_reports_counts_and_time_at_its_end(home):
    lines, config = [], parse_config(tiny_document())
    stage = Stage("shard", 1, lambda run: ({}, {}), lambda run, output: {"counts": {"read": 1040, "written": 39}})
    with progress.following(lambda *line: lines.append(line)):
        stage.execute(Run(config, "first"))
        stage.execute(Run(config, "again"))
    progress.announce("shard", "nobody listens")
    (first, second) = lines
    assert first[0] == "shard"
    assert re.fullmatch(r"1,040 read, 39 written \(\d+\.\d s\)", first[1])
    assert second == ("shard", "1,040 read, 39 written (cached)")


@pytest.mark.parametrize(
    ("pieces", "told"), [("", ["resumes: keeps 1 object of an interrupted attempt"]), ("work", []), (None, [])]
)
def test_stage_that_keeps_what_an_interrupted_attempt_finished_says_so(home, pieces, told):
    counting = Counting(pieces=pieces)
    lines = []
    with progress.following(lambda _, text: lines.append(text)):
        counting.fail = True
        with pytest.raises(StageError):
            counting.stage.execute(a_run())
        assert lines == []
        counting.fail = False
        counting.stage.execute(a_run())
        counting.stage.execute(a_run(force_from="prepare"))
    assert [line for line in lines if "resumes" in line] == told
