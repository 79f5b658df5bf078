"""Deleting a damaged shard and repeating the pipeline, as the message said, gave "cached" and the same error again.

Each test follows a remedy literally: it runs what the message names, then the pipeline, whose outputs must be the same
bytes as before the damage.
"""

import re
import shlex

import pytest
from support import copy_finished, small_corpus, tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from recognition.bundle import load_bundle
from storage.intact import DamagedObjectError
from storage.objects import ObjectStore
from tasks.config.pipeline import parse_config
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import DECODE
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.score import SCORE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN

COMMAND = re.compile(r"`(starling storage verify --repair --url \S+)`")


def starling(command, status=0):
    """Run a command as it stands in a message."""
    words = shlex.split(command)
    assert words[0] == "starling"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def until(stages, document):
    run = Run(parse_config(document), "r")
    for stage in stages:
        stage.execute(run)
    return run


def content(store):
    """All objects but the notes of use; of a decoding's record not how long it took."""

    def timeless(name):
        if not (name.startswith("decode/") and name.endswith("done.json")):
            return store.read(name)
        return {key: value for key, value in store.read_json(name).items() if key not in ("speed", "checksum")}

    return {name: timeless(name) for name in store.list() if "/uses/" not in name}


@pytest.fixture
def prepared(home, tmp_path):
    """A store with the first stages' outputs, and how to run them again."""
    table = small_corpus(tmp_path / "corpus", speakers=5, each=3)
    data = {"sources": [{"kind": "table", "path": str(table)}], "sample_rate": 8000}
    storage = {"shard_seconds": 1.5, "workers": 2}
    features = {"num_mels": 16, "stored": True}
    document = {"name": "f", "data": data, "storage": storage, "features": features}

    def run_again():
        return until((PREPARE, SHARD, FEATURES), document)

    run_again.document = document
    run_again()
    return ObjectStore(home / "objects"), run_again


def flip(data):
    place = len(data) // 3
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


OBJECTS = [
    "prepare/*/utterances.parquet",
    "prepare/*/quarantine.parquet",
    "prepare/*/text-changes.parquet",
    "prepare/*/done.json",
    "shard/*/train/shard-000000.tar",
    "shard/*/train/parts/shard-000001.tar.json",
    "shard/*/train/index.parquet",
    "shard/*/done.json",
    "features/*/train/shard-000001.tar",
    "features/*/train/parts/shard-000000.tar.json",
    "features/*/train/stats/shard-000000.json",
    "features/*/train/index.parquet",
    "features/*/done.json",
]
DAMAGES = {"flipped": flip, "cut": lambda data: data[:-9], "empty": lambda data: b"", "gone": None}


def find(store, pattern):
    (path,) = list(store.local_path("x").parent.glob(pattern))[:1]
    return str(path.relative_to(store.local_path("x").parent))


def harm(store, name, damage):
    if damage is None:
        store.delete(name)
    else:
        store.write(name, damage(store.read(name)))


def test_following_the_remedy_restores_every_output(prepared):
    """For each damage, verify names object and remedy; after the remedy, the pipeline makes the object again."""
    store, run_again = prepared
    before = content(store)
    for number, pattern in enumerate(OBJECTS):
        kind = list(DAMAGES)[number % 4]
        name = find(store, pattern)
        if kind == "gone" and name.endswith("done.json"):
            kind = "empty"
        harm(store, name, DAMAGES[kind])
        told = starling(f"starling storage verify --url {store.url}", status=1)
        assert store.join(name) in told, (pattern, kind)
        assert "1 problem\n" in told, (pattern, kind, told)
        said = starling(COMMAND.search(told)[1])
        assert "/".join(name.split("/")[:2]) in said
        run_again()
        assert content(store) == before, (pattern, kind)
    assert "all intact" in starling(f"starling storage verify --url {store.url}")


def test_deleted_outputs_are_made_again_by_the_next_run(prepared):
    store, run_again = prepared
    before, said = content(store), list[str]()
    for pattern in OBJECTS:
        name = find(store, pattern)
        store.delete(name)
        if name.endswith(".tar"):
            folder, _, tar = name.rpartition("/")
            store.delete(f"{folder}/parts/{tar}.json")
        said.clear()
        with progress.following(lambda stage, line: said.append(line)):
            run_again()
        assert content(store) == before, pattern
        if not name.endswith("done.json"):
            (line,) = (line for line in said if "runs again and keeps the intact objects" in line)
            assert f"objects/{'/'.join(name.split('/')[:2])}/" in line


def test_run_that_reads_damage_names_object_and_remedy(prepared):
    store, run_again = prepared
    before = content(store)
    for pattern, stage in (
        ("prepare/*/utterances.parquet", "shard"),
        ("prepare/*/done.json", ""),
        ("shard/*/train/index.parquet", "features"),
        ("features/*/train/stats/shard-000000.json", "features"),
        ("features/*/train/parts/shard-000000.tar.json", ""),
    ):
        name = find(store, pattern)
        data = store.read(name)
        store.write(name, b"{}" if name.endswith(".json") else data[:60] + bytes([data[60] ^ 1]) + data[61:])
        if stage:  # that reads it
            store.delete(find(store, f"{stage}/*/done.json"))
        if "parts" in pattern or "stats" in pattern:  # the stage itself detects the damage
            run_again()
        else:
            with pytest.raises(DamagedObjectError) as caught:
                run_again()
            assert store.join(name) in str(caught.value)
            starling(COMMAND.search(str(caught.value))[1])
            run_again()
        assert content(store) == before, pattern


def test_command_line_reports_damage_in_one_line(prepared, tmp_path):
    store, run_again = prepared
    config = write_config(tmp_path / "c.yaml", run_again.document)
    name = find(store, "prepare/*/done.json")
    store.write(name, b"{}")
    done = CliRunner().invoke(app, ["run", str(config), "--no-prefect", "--until", "prepare"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    (line,) = [line for line in done.output.splitlines() if store.join(name) in line]
    starling(COMMAND.search(line)[1])
    assert CliRunner().invoke(app, ["run", str(config), "--no-prefect", "--until", "prepare"]).exit_code == 0


def test_outputs_of_later_stages_are_restored_without_damaged_input(home):
    copy_finished(home)
    stages = (PREPARE, SHARD, FEATURES, TRAIN, DECODE, SCORE)
    document = tiny_document()
    until(stages, document)
    store = ObjectStore(home / "objects")
    before = content(store)
    for pattern, reader in (
        ("decode/*/test.parquet", "score"),
        ("decode/*/test.hyp.trn", ""),
        ("score/*/scores.json", ""),
        ("train/*/model/model.safetensors", "decode"),
        ("train/*/model/bundle.json", "decode"),
    ):
        name = find(store, pattern)
        whole = store.read(name)
        store.write(name, flip(whole))
        if reader:
            store.delete(find(store, f"{reader}/*/done.json"))
            with pytest.raises(DamagedObjectError, match="its SHA-256 differs from the stage's record") as caught:
                until(stages, document)
            assert store.join(name) in str(caught.value)
        if name.startswith("train"):  # it would be trained again: see below
            store.write(name, whole)
        else:
            starling(COMMAND.search(starling(f"starling storage verify --url {store.url}", status=1))[1])
        until(stages, document)
        assert content(store) == before, pattern


@pytest.mark.slow
def test_lost_model_is_trained_again(home, tmp_path):
    copy_finished(home)
    stages = (PREPARE, SHARD, FEATURES, TRAIN)
    until(stages, tiny_document())
    store = ObjectStore(home / "objects")
    name = find(store, "train/*/model/model.safetensors")
    store.write(name, flip(store.read(name)))
    starling(COMMAND.search(starling(f"starling storage verify --url {store.url}", status=1))[1])
    run = until(stages, tiny_document())
    assert not run.result("train").cached
    assert run.result("train").counts["epochs"] == 2
    load_bundle(fetch_bundle(run.result("train").output, tmp_path))
    starling(f"starling storage verify --url {store.url}")
