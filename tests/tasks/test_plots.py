import matplotlib.image
import pytest

from tasks.tracking.plots import by_learner, joined_steps, learning_curves


def step(n, **more):
    return {
        "kind": "step",
        "learner": "0.0",
        "step": n,
        "epoch": n / 10,
        "loss": 3 / n,
        "lr": 0.1,
        "audio_seconds": 10.0 * n,
        "elapsed": n,
    } | more


VALID = {"kind": "valid", "step": 9, "epoch": 1, "valid_loss": 1.0, "valid_wer": 0.5}


@pytest.mark.parametrize(
    "journal",
    [
        [],
        [step(1)],
        [step(1), step(2), step(3), VALID],
        [step(1), step(2, loss=float("nan"), elapsed=1), VALID | {"valid_wer": float("nan")}],
        [{"kind": "start", "step": 0}, {"kind": "resume", "step": 0}, {"kind": "end", "step": 3}],
        [{"kind": "step", "step": 1, "epoch": 0.1}, VALID],  # of no learner
    ],
)
@pytest.mark.variants(3)
def test_any_journal_can_be_plotted(tmp_path, journal):
    path = learning_curves(journal, tmp_path / "curves.png")
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    assert image[..., :3].std() > 0.01


def test_throughput_skips_entries_without_time():
    steps = [step(1), step(2), step(3, elapsed=2), step(4, elapsed=6, audio_seconds=70.0)]
    assert [point["throughput"] for point in joined_steps(steps)] == [None, 10.0, None, 10.0]


def ring(learners, steps, **more):
    """A journal of several learners that exchange weights."""
    own = {"staleness": 1.0, "distance": 0.01, "nodes": learners} | more
    entries = [step(n, learner=f"{who}.0", loss=3.0 + who, **own) for n in range(1, steps) for who in range(learners)]
    replicas = {str(who): 1.0 + who / 10 for who in range(learners)}
    return [{"kind": "start", "step": 0}, *entries, VALID | {"replicas": replicas}]


def test_learners_are_plotted_averaged_and_individually():
    journal = ring(3, 6)
    assert sorted(by_learner(journal)) == ["0.0", "1.0", "2.0"]
    joined = joined_steps(journal)
    assert [entry["loss"] for entry in joined] == [4.0] * 5
    assert [entry["throughput"] for entry in joined] == [None, 30.0, 30.0, 30.0, 30.0]
    assert by_learner(ring(1, 6)) == {}


def test_exchanges_are_plotted_only_for_several_learners(tmp_path):
    ring_, alone = (
        matplotlib.image.imread(learning_curves(journal, tmp_path / f"{name}.png"))
        for name, journal in (("ring", ring(3, 6)), ("alone", ring(1, 6, staleness=None, distance=None)))
    )
    assert ring_.shape[0] > 1.3 * alone.shape[0]


def test_curves_after_a_resume_keep_valid_steps(tmp_path):
    resume = {"kind": "resume", "step": 4, "steps": {"0.0": 2, "1.0": 2}}
    again = [entry | {"step": entry["step"] + 2} for entry in ring(2, 3)[1:-1]]
    journal = [*ring(2, 3)[:-1], resume, *again]
    assert [entry["step"] for entry in joined_steps(journal)] == [2, 4, 6, 8]
    assert learning_curves(journal, tmp_path / "curves.png").exists()


def test_models_without_wer_have_learning_curves(tmp_path):
    journal = [step(1), VALID | {"valid_wer": None, "valid_frame_accuracy": 0.5}]
    assert learning_curves(journal, tmp_path / "curves.png").stat().st_size > 1000


def test_labels_are_large_and_inside_the_figure(tmp_path, monkeypatch):
    """In the report the figure has 1,000 pixels: a point is 1.4 of them, and text beside it has 15."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: saved.append((figure, dpi)))
    steps = [step(n, learner=f"{rank}.0", distance=0.01, staleness=1.0) for n in range(1, 9) for rank in (0, 1)]
    learning_curves([*steps, VALID | {"replicas": {"0": 1.0, "1": 1.1}}], tmp_path / "curves.png")
    [(figure, dpi)] = saved
    loss, rates, rate, throughput = figure.axes[:4]
    assert (loss.get_title(), rate.get_title(), throughput.get_title()) == ("Loss", "Learning rate", "Throughput")
    assert rates.get_title()
    assert [line.get_label() for line in loss.get_lines() if not line.get_label().startswith("_")] == [
        "one learner",
        "training, mean of 2 learners",
        "validation, one replica",
        "validation",
    ]
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * dpi
    labels = [label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels())]
    assert min(label.get_fontsize() for label in labels) * dpi / 72 * 1000 / width >= 15
    for axes in figure.axes:
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title, axes.get_legend()):
            if label is not None:
                box = label.get_window_extent()
                assert 0 <= box.x0 <= box.x1 <= width
                assert 0 <= box.y0 <= box.y1 <= height
