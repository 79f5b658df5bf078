"""An axis of losses from 1.9 to 3.1 was labelled "2 × 10⁰" and "3 × 10⁰", and a plot of a search had a tick or none."""

import pytest
from matplotlib.figure import Figure

from tasks.tracking.plots import learning_curves, plain_log


def labels(low, high):
    """The texts beside a logarithmic axis."""
    figure = Figure()
    axes = figure.subplots()
    axes.set(yscale="log", ylim=(low, high))
    plain_log(axes.yaxis)
    figure.draw_without_rendering()
    return [label.get_text() for label in axes.yaxis.get_majorticklabels()]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1.9, 3.1, ["2", "2.5", "3"]),
        (2.02, 2.11, ["2.02", "2.04", "2.06", "2.08", "2.1"]),
        (3.0, 18.0, ["5", "10", "15"]),
        (0.4, 4.2, ["0.5", "1", "2"]),
        (0.004, 4.2, ["0.01", "0.1", "1"]),
        (1e-5, 2.1e-5, ["1e-05", "1.5e-05", "2e-05"]),
    ],
)
def test_ticks_are_plain_numbers(low, high, wanted):
    assert labels(low, high) == wanted


def test_loss_of_a_training_has_such_ticks(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    steps = [{"kind": "step", "step": n, "epoch": n / 10, "loss": 3.0 - n / 10, "lr": 0.1} for n in range(1, 10)]
    learning_curves(steps, tmp_path / "curves.png")
    drawn[0].draw_without_rendering()
    axis = drawn[0].axes[0].yaxis
    shown = [label.get_text() for label in (*axis.get_majorticklabels(), *axis.get_minorticklabels())]
    assert len(shown) >= 3
    assert all(float(text) > 0 for text in shown)
