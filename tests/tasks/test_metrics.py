import json
import random

import pytest

from tasks.tracking.metrics import MetricPoint, StepRounds, Translator, closing_points, mean
from training.coordinator.journal import Journal, read_journal


def step(learner, n, **more):
    entry = {"kind": "step", "step": n, "epoch": n / 10, "epochs": 2, "loss": 10.0 / n, "lr": 0.1, "elapsed": float(n)}
    return entry | {"learner": learner, "nodes": 2} | more


def translate(entries):
    translator = Translator()
    return [point for entry in entries for point in translator.feed(entry)], translator


def series(points, name):
    return [(point.step, point.value) for point in points if point.name == name]


def test_metrics_are_written_per_learner_and_globally():
    entries = [
        step("0.0", n, loss=1.0) | {"learner": who, "loss": value}
        for n in (1, 2, 3)
        for who, value in (("0.0", 1.0), ("1.0", 3.0))
    ]
    points, _ = translate([{"kind": "start", "step": 0}, *entries])
    assert series(points, "training-single-learners/loss.0.0") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert series(points, "training-single-learners/loss.1.0") == [(1, 3.0), (2, 3.0), (3, 3.0)]
    assert series(points, "training/loss") == [(2, 2.0), (4, 2.0), (6, 2.0)]
    assert series(points, "training-engine/nodes") == [(2, 2.0), (4, 2.0), (6, 2.0)]


def test_folders_that_mlflow_shows_first_have_error_rates_and_losses_and_the_last_one_single_learners():
    valid = {"kind": "valid", "epoch": 1, "step": 2, "valid_loss": 1.5, "valid_wer": 0.5, "train_loss": 2.0}
    valid |= {"audio_seconds": 9.0, "unalignable": 0, "elapsed": 3.0}
    exchange = {"distance": 0.1, "exchange_s": 0.2, "exchanges_per_step": 1.0, "staleness": 1.0, "step_s": 0.5}
    points, _ = translate([step("0.0", 1, audio_seconds=4.0, utterances=2), step("0.0", 2, **exchange), valid])
    folders = {}
    for point in points:
        folder, _, name = point.name.rpartition("/")
        folders.setdefault(folder, set()).add(name)
    # in the order in which MLflow shows them
    assert sorted(folders) == ["WER", "training", "training-engine", "training-progress", "training-single-learners"]
    assert folders["WER"] == {"valid_wer"}
    assert folders["training"] == {"loss", "lr", "train_loss", "valid_loss"}
    assert folders["training-engine"] == {"nodes", *exchange}
    assert folders["training-progress"] == {"audio_seconds", "elapsed", "epoch", "unalignable"}


def test_metrics_of_learners_and_nodes_can_be_omitted():
    entries = [{"kind": "start", "step": 0}, *(step(f"{who}.0", n) for n in (1, 2) for who in range(2))]
    entries += [{"kind": "valid", "epoch": 1, "step": 4, "valid_loss": 1.5, "replicas": {"0": 1.6, "1": 1.7}}]
    with_learners, translator = translate(entries), Translator(learners=False)
    without = [point for entry in entries for point in translator.feed(entry)]
    assert {point.name for point in without} == {p.name for p in with_learners[0] if "learners/" not in p.name}
    assert {"training/loss", "training/valid_loss", "training-engine/nodes"} <= {point.name for point in without}
    # corrections after a resume neither
    assert not [p for p in closing_points(translator, entries[:3]) if p.name.startswith("training-single-learners/")]


def test_steps_without_a_learner_are_skipped(caplog):
    nobody = {name: value for name, value in step("0.0", 1).items() if name != "learner"}
    assert translate([nobody, step("0.0", 2)])[0] == translate([step("0.0", 2)])[0]
    assert "a line of the journal gives no metrics" in caplog.text


def test_slow_learner_delays_no_other_and_new_learner_joins():
    rounds = StepRounds()
    ends = []
    for who, n in [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3), ("c", 2), ("a", 4), ("b", 4)]:
        ends += rounds.feed(step(who, n))
    assert [(end["step"], end["learners"]) for end in ends] == [(3, 3), (5, 2), (7, 2), (10, 3)]
    assert rounds.flush() == []


def test_throughput_sums_learners_and_skips_entries_without_time():
    rounds = StepRounds()
    ends = []
    for n in (1, 2, 3):
        for who, rate in (("0.0", 10.0), ("1.0", 5.0)):
            ends += rounds.feed(step(who, n, audio_seconds=rate * n))
    assert [end["throughput"] for end in ends] == [None, 15.0, 15.0]
    alone = StepRounds()
    steps = [step("0.0", n, audio_seconds=10.0 * n, elapsed=time) for n, time in ((1, 1), (2, 2), (3, 2), (7, 6))]
    ends = [end for entry in steps for end in alone.feed(entry)] + alone.flush()
    assert [end["throughput"] for end in ends] == [None, 10.0, None, 10.0]


def test_throughput_is_not_measured_across_a_restart_of_counts():
    rounds = StepRounds()

    def rates(*audio):
        entries = [step("0.0", n, audio_seconds=seconds) for n, seconds in audio]
        return [end["throughput"] for entry in entries for end in rounds.feed(entry)]

    assert rates((4, 40.0), (5, 50.0), (6, 20.0), (7, 40.0)) == [None, 10.0, None, 20.0]
    rounds.restart({"0.0": 3, "1.0": 7})
    assert rates((8, 90.0)) == []
    (joined,) = rounds.flush()
    # the speed is not known yet, and the other's steps count from its checkpoint
    assert (joined["throughput"], joined["step"], joined["learners"]) == (None, 15, 1)


def test_points_after_a_resume_are_later_than_closing_points():
    points, translator = translate([step("0.0", n) for n in (1, 2, 3)])
    closing = closing_points(translator, [step("0.0", 1)])
    assert {point.at_ms for point in closing} == {max(point.at_ms for point in points) + 1}
    translator.feed({"kind": "resume", "step": 1, "steps": {"0.0": 1}, "epoch": 0})
    later = translator.feed(step("0.0", 2, elapsed=0.5))
    assert min(point.at_ms for point in later) > closing[0].at_ms


def test_epoch_has_validation_of_average_and_each_replica():
    valid = {
        "kind": "valid",
        "epoch": 1,
        "epochs": 2,
        "step": 40,
        "train_loss": 2.0,
        "valid_loss": 1.5,
        "valid_wer": 0.5,
        "replicas": {"0": 1.6, "1": 1.7},
        "elapsed": 9.0,
    }
    epoch = {"kind": "epoch", "epoch": 1, "repeated": 3, "repeated_ids": ["a"], "utterances": 10, "elapsed": 9.0}
    points, _ = translate([valid, epoch, {"kind": "end", "step": 41, "valid_loss": 1.4, "valid_wer": 0.4}])
    assert series(points, "training/valid_loss") == [(40, 1.5)]
    assert series(points, "training-single-learners/valid_loss.1") == [(40, 1.7)]
    assert series(points, "training/train_loss") == [(40, 2.0)]
    assert series(points, "training-progress/elapsed") == [(40, 9.0)]
    assert series(points, "training-progress/repeated") == [(40, 3.0)]
    assert series(points, "training-final/valid_loss") == [(41, 1.4)]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", True, [1]])
def test_values_that_are_not_finite_are_omitted(value):
    points, _ = translate([step("0.0", 1, loss=value, staleness=value), step(None, 2, loss=value)])
    assert not [p for p in points if p.name.endswith(("loss", "staleness"))]
    assert mean([value]) is None


def test_metric_names_are_valid_for_mlflow():
    from mlflow.utils.validation import _validate_metric_name

    points, _ = translate([step("0.0", 1), step("node/é<3>", 1, **{"valid?": 1}), step(None, 2, **{"a?b": 1.0})])
    assert points
    for point in points:
        _validate_metric_name(point.name)


def repeated_training():
    """A training that lost steps 4 to 6 of one learner, and ended at step 5 the second time."""
    first = [step("0.0", n) for n in range(1, 7)]
    resume = {"kind": "resume", "step": 3, "epoch": 0, "steps": {"0.0": 3}}
    return [
        {"kind": "start", "step": 0},
        *first,
        resume,
        *(step("0.0", n, loss=7.0 + n, elapsed=n - 1.5) for n in (4, 5)),
    ]


def test_repeated_steps_are_later_and_last_value_is_correct(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in repeated_training()))
    points, translator = translate(repeated_training())
    times = [point.at_ms for point in points if point.name == "training-single-learners/loss.0.0"]
    assert times == sorted(set(times))
    assert translator.highest["training-single-learners/loss.0.0"].step == 6
    closing = {point.name: point for point in closing_points(translator, read_journal(path))}
    assert closing["training-single-learners/loss.0.0"][1::2] == (12.0, 6)
    assert (
        closing["training-single-learners/loss.0.0"].at_ms
        > translator.highest["training-single-learners/loss.0.0"].at_ms
    )
    assert closing["training/loss"].value == 12.0


def test_training_without_resume_needs_no_closing_points(tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    entries = [step(f"{n % 3}.0", 1 + n // 3) for n in range(30)]
    for entry in entries:
        journal.write(**{"kind": entry["kind"], **{k: v for k, v in entry.items() if k != "kind"}})
    journal.close()
    _, translator = translate(entries)
    assert closing_points(translator, read_journal(tmp_path / "j.jsonl")) == []


def test_same_journal_always_gives_the_same_points():
    draw = random.Random(3)
    entries = [{"kind": "start", "step": 0}]
    for n in range(1, 300):
        entries.append(step(f"{draw.randrange(4)}.{draw.randrange(2)}", n, elapsed=draw.random() * n))
        if draw.random() < 0.03:
            entries.append({"kind": "resume", "step": n, "steps": {"0.0": n // 8}, "epoch": 0})
    assert translate(entries)[0] == translate(entries)[0]
    assert len(set(translate(entries)[0])) == len(translate(entries)[0])
    assert all(isinstance(point, MetricPoint) and point.at_ms >= 0 for point in translate(entries)[0])


def test_machine_samples_are_mlflow_system_metrics(tmp_path):
    from mlflow.utils.validation import _validate_metric_name

    system = {
        "kind": "system",
        "node": 1,
        "host": "b",
        "cpu": 40.0,
        "memory": 20.0,
        "memory_mb": 900.0,
        "elapsed": 12.5,
    }
    gpus = [{"gpu": 0, "load": 90.0, "memory": 50.0, "memory_mb": 8000.0, "watts": 300.0}, "?", {"gpu": None}]
    entries = [step("0.0", 1), system | {"gpus": gpus}, system | {"elapsed": 22.5, "cpu": 60.0}, step("0.0", 2)]
    points, translator = translate(entries)
    assert series(points, "system/node-1/cpu_utilization_percentage") == [(12, 40.0), (22, 60.0)]
    assert series(points, "system/node-1/system_memory_usage_megabytes")[0] == (12, 900.0)
    assert series(points, "system/node-1/gpu_0_utilization_percentage") == [(12, 90.0)]
    assert series(points, "system/node-1/gpu_0_power_usage_watts") == [(12, 300.0)]
    for point in points:
        _validate_metric_name(point.name)
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, {"kind": "start", "step": 0}]))
    assert not [point for point in closing_points(translator, read_journal(path)) if point.name.startswith("system/")]
