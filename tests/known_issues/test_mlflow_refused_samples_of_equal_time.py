"""Machine samples taken while a training waited for its nodes had equal time and step: MLflow refused them."""

import json
import math
import random
from collections import Counter
from pathlib import Path

import mlflow
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric
from support import give_mlflow

from tasks.tracking.forwarding import send_rest
from tasks.tracking.metrics import Translator, closing_points
from tasks.tracking.runs import TrainingRun, client
from training.coordinator.journal import read_journal

ABOUT = TrainingRun("t-late", "late", "run")


def sample(node, elapsed, cpu):
    return {"kind": "system", "node": node, "host": "h", "cpu": cpu, "memory": 20.0, "elapsed": elapsed}


def waiting():
    """A journal whose clock stands still: node 0 takes three samples before node 1 comes."""
    steps = [
        {"kind": "step", "learner": f"{node}.0", "step": n, "epoch": n / 9, "loss": 9.0 / n, "elapsed": n / 2}
        for n in range(1, 6)
        for node in (0, 1)
    ]
    return [{"kind": "start", "step": 0}, *(sample(0, 0.0, cpu) for cpu in (10.0, 20.0, 30.0)), *steps]


def save(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def history(api, run_id):
    return {name: api.get_metric_history(run_id, name) for name in api.get_run(run_id).data.metrics}


class NoModel:
    """An MLflow flavor whose models are empty folders: saving a real one takes seconds."""

    __name__ = "empty"

    @staticmethod
    def save_model(path, mlflow_model):
        Path(path).mkdir()
        mlflow_model.save(f"{path}/MLmodel")


def log_model(run_id, step):
    """Log a model as MLflow does for every flavor."""
    with mlflow.start_run(run_id=run_id):
        return mlflow.models.Model.log(None, NoModel(), name="model", run_id=run_id, step=step).model_id


def test_journal_with_equal_times_is_sent_and_model_logged(home, tmp_path):
    give_mlflow(home)
    path = save(tmp_path / "journal.jsonl", waiting())
    run_id = send_rest(path, tmp_path / "note.json", ABOUT)
    points = history(client(), run_id)
    cpu = points["system/node-0/cpu_utilization_percentage"]
    assert [point.value for point in cpu] == [10.0, 20.0, 30.0]
    for name, series in points.items():
        keys = [(point.timestamp, point.step) for point in series]
        assert len(keys) == len(set(keys)), name
    for step in (0, 5):
        assert log_model(run_id, step)


def test_closing_points_of_two_sessions_have_different_times(tmp_path):
    """Each session that ends below the highest step repeats its last value there; the later one must be the last."""
    entries, sent = [{"kind": "start", "step": 0}], []

    def steps(first, last, add):
        for n in range(first, last + 1):
            at = n / 10 + add
            entries.append({"kind": "step", "learner": "0.0", "step": n, "epoch": 0.1, "loss": n + add, "elapsed": at})

    def close():
        translator = Translator()
        for entry in entries:
            translator.feed(entry)
        points = closing_points(translator, read_journal(save(tmp_path / "j.jsonl", entries)))
        sent.extend(point for point in points if point.name == "training-single-learners/loss.0.0")

    steps(1, 20, 0)
    for add, (first, last) in enumerate([(6, 9), (8, 11)], 1):
        entries.append({"kind": "resume", "step": first - 1, "steps": {"0.0": first - 1}, "epoch": 0})
        steps(first, last, add / 4)
        close()
    assert [(point.value, point.step) for point in sent] == [(9.25, 20), (11.5, 20)]
    assert sent[0].at_ms < sent[1].at_ms


NUMBERS = st.one_of(
    st.integers(-1, 5),
    st.floats(-1, 5),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf, 10**400, 1e300, 2**63, None, "text", True, [], {}]),
)
NAMES = st.sampled_from(["0.0", "1.0", "../x", "/", "", "a//b", ".", "é?", 3, None])


def entries():
    kinds = st.sampled_from(["step"] * 4 + ["system"] * 4 + ["start", "resume", "valid", "epoch", "end", "?"])
    fields = ("step", "epoch", "elapsed", "loss", "cpu", "audio_seconds", "valid_loss", "replicas", "steps")
    return st.fixed_dictionaries(
        {"kind": kinds, "node": st.sampled_from([0, 1, "..", None])},
        optional={"learner": NAMES, "x/../y": NUMBERS} | dict.fromkeys(fields, NUMBERS),
    )


@settings(max_examples=60)
@given(st.lists(entries(), min_size=20, max_size=60), st.integers())
def test_mlflow_accepts_the_points_of_any_journal(drawn, seed):
    # half of the entries are valid, so that rounds, resumes and clocks occur at all
    draw, sound = random.Random(seed), waiting()
    told = [entry for odd in drawn for entry in (odd, draw.choice(sound) | {"elapsed": draw.choice([0.0, 1.0, 2.5])})]
    translator = Translator()
    points = [point for entry in told for point in translator.feed(entry)]
    assert len(points) > 20
    keys = Counter((point.name, point.at_ms, point.step) for point in points)
    assert keys.most_common(1)[0][1] == 1
    for point in points:
        _validate_metric(point.name, point.value, point.at_ms, point.step)
        assert math.isfinite(point.value)
        assert max(abs(point.at_ms), abs(point.step)) < 2**62
