"""A server follows an alias: new versions are loaded beside the old one, and what cannot be loaded leaves it."""

import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from support import give_mlflow, load_beside

from recognition.serving.models import LoadedModel, ModelSwitch
from recognition.transcriber import Transcriber
from tasks.tracking import following
from tasks.tracking.following import AliasFollower, load_version
from tasks.tracking.runs import client

add_bundle = load_beside(__file__, "registered.py").add_bundle


@pytest.fixture
def api(home):
    give_mlflow(home)
    return client()


class Loads:
    """Loads versions and remembers their folders."""

    def __init__(self):
        self.folders, self.tries = {}, []

    def __call__(self, version, folder, discard):
        self.tries.append(version)
        transcriber = Transcriber(folder)
        transcriber.warm_up()
        self.folders[version] = Path(folder)
        return LoadedModel(version, transcriber, discard)


@pytest.fixture
def followed(api, tmp_path):
    """A follower of `@champion`, which is version 1, and its parts."""
    load = Loads()
    number = add_bundle(api, tmp_path)
    api.set_registered_model_alias("m", "champion", number)
    switch = ModelSwitch("m", load_version("m", number, load))
    follower = AliasFollower("m", "champion", load, switch)
    yield follower, switch, load
    switch.current.queue.close(10)
    switch.current.discard()


def test_a_new_champion_replaces_the_old_one_whose_files_are_removed(api, tmp_path, followed):
    follower, switch, load = followed
    follower.look()
    assert (switch.current.version, load.tries) == ("1", ["1"])
    api.set_registered_model_alias("m", "champion", add_bundle(api, tmp_path))
    with switch.use() as old:
        follower.look()
        assert switch.current.version == "2"
        assert old.version == "1"
        assert load.folders["1"].is_dir()
    for thread in threading.enumerate():
        if thread.name == "retire":
            thread.join(240)
    assert not load.folders["1"].exists()
    assert load.folders["2"].is_dir()
    assert switch.problem == ""


def test_a_rollback_is_followed(api, tmp_path, followed):
    follower, switch, _ = followed
    api.set_registered_model_alias("m", "champion", add_bundle(api, tmp_path))
    follower.look()
    api.set_registered_model_alias("m", "champion", "1")
    follower.look()
    assert switch.current.version == "1"


def test_a_damaged_version_leaves_the_old_one_and_is_tried_again_less_and_less_often(api, tmp_path, followed):
    follower, switch, load = followed
    changes = []
    switch.on_change = lambda text, problem: changes.append((text, problem))
    api.set_registered_model_alias("m", "champion", add_bundle(api, tmp_path, damaged=True))
    for _ in range(12):
        follower.look()
    assert switch.current.version == "1"
    assert "version 2 of m cannot be loaded" in switch.problem
    assert "SHA-256" in switch.problem
    assert load.tries == ["1", "2", "2", "2", "2"]  # at looks 1, 3, 6 and 11
    assert switch.failures == 4
    assert len(changes) == 1
    api.set_registered_model_alias("m", "champion", add_bundle(api, tmp_path))
    follower.look()
    assert switch.current.version == "3"
    assert switch.problem == ""


def test_a_registry_that_does_not_answer_leaves_the_old_one(api, followed, monkeypatch):
    follower, switch, _ = followed

    def fail(*_):
        raise MlflowException("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(following, "version_of", fail)
        follower.look()
    assert "the server is away" in switch.problem
    assert switch.current.version == "1"
    follower.look()
    assert switch.problem == ""


def test_an_alias_that_is_removed_leaves_the_old_one(api, followed):
    follower, switch, _ = followed
    api.delete_registered_model_alias("m", "champion")
    follower.look()
    assert "no version of m is @champion any more" in switch.problem
    assert switch.current.version == "1"


def test_a_version_whose_load_fails_leaves_no_files(api, tmp_path, followed):
    number = add_bundle(api, tmp_path, damaged=True)
    folders = []

    def load(version, folder, discard):
        folders.append(Path(folder))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        load_version("m", number, load)
    assert not folders[0].exists()


def test_following_ends_when_it_is_told(followed):
    follower, _, _ = followed
    stop, looks = threading.Event(), []
    follower.look = lambda: (looks.append(1), len(looks) == 3 and stop.set())
    follower.run(0.01, stop)
    assert len(looks) == 3
