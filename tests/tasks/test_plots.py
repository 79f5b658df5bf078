import matplotlib.image
import pytest

from tasks.plots import _throughput, learning_curves


def step(n, **more):
    return {
        "kind": "step",
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
    ],
)
def test_any_journal_gives_a_picture(tmp_path, journal):
    path = learning_curves(journal, tmp_path / "curves.png")
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    assert image[..., :3].std() > 0.01


def test_throughput_is_audio_over_time_and_skips_what_has_no_time():
    steps = [step(1), step(2), step(3, elapsed=2), step(4, elapsed=6, audio_seconds=70.0)]
    assert [point["rate"] for point in _throughput(steps)] == [10.0, 10.0]
