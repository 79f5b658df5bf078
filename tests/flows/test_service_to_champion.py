"""The whole loop with real, tiny models: a served champion, what it doubts, corrections, a warm start, its successor.

The language has six words, each a tone. The first model has heard them in a quiet room; the service, and the test set,
are in a noisy place.
"""

import csv
import json

import numpy as np
import pytest
import soundfile
from support import give_mlflow, load_beside, wait_until

from flows.cli.serve import open_model
from recognition.serving import collecting
from recognition.serving.collecting import COLLECTED, TABLE, offer_rows
from tasks.config.pipeline import MonitorConfig, parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.tracking.monitoring import monitor_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
tones = load_beside(__file__, "../recognition/running_server.py")
RATE, WORDS = tones.RATE, tones.WORDS
BELOW = 0.95
EPOCHS = 14, 14
"""Of the two trainings."""


QUIET, NOISY = (0.002, 0.004), (0.2, 0.45)
"""Least and largest amplitude of the noise."""


def said(seed, noise):
    """A text and its audio, in another voice each time: pitch, level, noise."""
    draw = np.random.default_rng(seed)
    text = " ".join(draw.choice(WORDS, draw.integers(1, 3)))
    wave = tones.speak(text, rate=int(RATE * draw.uniform(0.97, 1.03))) * draw.uniform(0.5, 1.0)
    return text, (wave + draw.normal(0, draw.uniform(*noise), len(wave))).astype(np.float32)


def write_corpus(folder):
    """A quiet training and validation set, and a test set that is as the service."""
    folder.mkdir()
    rows, seed = [("audio", "text", "split")], 0
    for split, noise, count in (("train", QUIET, 110), ("valid", QUIET, 15), ("test", NOISY, 60)):
        for _ in range(count):
            text, wave = said(seed := seed + 1, noise)
            soundfile.write(folder / f"{seed}.flac", wave, RATE)
            rows.append((f"{seed}.flac", text, split))
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def configuration(*sources, **train):
    """A configuration as its user would write it: the second one differs in its sources and its beginning."""
    return parse_config(
        {
            "name": "tones",
            "data": {"sources": [*sources], "sample_rate": RATE, "speaker_overlap": "allow"},
            "features": {"num_mels": 16, "cmvn": "utterance"},
            "tokens": {"kind": "words"},
            "model": {
                "kind": "conformer",
                "dim": 32,
                "layers": 1,
                "heads": 2,
                "kernel": 5,
                "channels": 8,
                "dropout": 0.0,
            },
            "train": {
                "epochs": EPOCHS[0],
                "batch_seconds": 5,
                "device": "cpu",
                "threads": 1,
                "optimizer": {"kind": "adamw", "lr": 0.005},
                "augment": {"time_masks": 0, "freq_masks": 0},
                "schedule": {"kind": "constant", "warmup_epochs": 0.5},
                **train,
            },
        }
    )


def trained(config, run_id):
    run = Run(config, run_id)
    run_plainly(run)
    return run.result("register").record, run.result("score").record["sets"]["test"]["wer"]


def ask(server, texts_and_waves):
    """What the server recognizes, one utterance after the other."""
    answers = [tones.post(server, tones.flac(wave)) for _, wave in texts_and_waves]
    assert {status for status, _, _ in answers} == {200}
    return [content["text"] for _, _, content in answers]


def segments(path):
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == "segment"]


def correct(folder, texts):
    """Do what a person does: correct the text of each row but the last, and mark it."""
    made = offer_rows(folder)
    assert (made.new, made.checked) == (len(texts), 0)
    with (folder / TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, text in zip(rows[:-1], texts[:-1], strict=True):
        row |= {"text": text, "checked": "x"}
    with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def collected(folder):
    path = folder / COLLECTED
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def right(answers, spoken):
    return sum(answer == text for answer, (text, _) in zip(answers, spoken, strict=True))


def test_doubtful_utterances_of_a_service_make_a_better_champion(home, tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "_SPARE_BYTES", 0)
    give_mlflow(home)
    corpus = {"kind": "table", "path": str(write_corpus(tmp_path / "corpus")), "corpus": "old"}
    first, wer = trained(configuration(corpus), "first-run")
    assert first["decision"]["promoted"], first["decision"]["reason"]

    kept, log = tmp_path / "kept", home / "logs" / "serve-1.jsonl"
    served, _ = open_model("tones", "cpu", "energy")
    spoken = [said(10_000 + number, NOISY) for number in range(120)]
    with tones.serving(served.switch, log=log, collect=(kept, BELOW)) as server:
        before = ask(server, spoken)
        lines = segments(log)
        assert (len(lines), {line["version"] for line in lines}) == (len(spoken), {"1"})
        doubtful = [place for place, line in enumerate(lines) if line["confidence"] < BELOW]
        assert 20 < len(doubtful) < len(spoken)
        wait_until(lambda: len(collected(kept)) == len(doubtful))
        assert [row["hypothesis"] for row in collected(kept)] == [before[place] for place in doubtful]
        report = monitor_model("tones", MonitorConfig())  # the test set is as the service
        assert report.outcome == "Unchanged", report.message

        correct(kept, [spoken[place][0] for place in doubtful])
        service = {"kind": "table", "path": str(kept), "corpus": "service", "where": {"checked": "x"}, "set": "train"}
        again = configuration(corpus | {"share": 0.4}, service, init="@champion", epochs=EPOCHS[1])
        second, better = trained(again, "second-run")
        assert second["decision"]["promoted"], second["decision"]["reason"]
        assert better < wer

        served.follower.look()
        after = ask(server, spoken)
        assert {line["version"] for line in segments(log)[len(spoken) :]} == {"2"}
        assert right(before, spoken) < right(after, spoken)
