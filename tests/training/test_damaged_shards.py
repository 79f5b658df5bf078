"""Training shards that are truncated, altered or missing, from the start or later: left out, counted, named."""

import shutil

import pytest
from running_training import Running
from support import wait_until
from tones import train, train_here, with_task

from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine, TooManyShardsError
from training.launch.training_process import TrainingFailedError
from training.learner.compute import damage_folder, open_set

LAYOUTS = {"one": {"strategy": "single"}, "two": {"strategy": "adpsgd", "nodes": 2}}


@pytest.fixture
def speech(corpus, tmp_path):
    """A copy of the corpus that may be damaged."""
    for name in ("train", "valid"):
        shutil.copytree(corpus.folder / name, tmp_path / "speech" / name)
    return tmp_path / "speech"


def make_job(corpus, speech, **changes):
    urls = {f"{name}_url": str(speech / name) for name in ("train", "valid")}
    options = {"epochs": 3, "max_batch": 4, "max_unreadable": 0.3, "membership": {"beat_s": 0.2}}
    return corpus.job(speech.parent / "run", **urls, **(options | changes))


def damage(url, shard, kind="altered"):
    """Damage a shard; its record."""
    store = ObjectStore(str(url))
    record = ShardIndex.read(store).shards[shard]
    content = store.read(record.name)
    if kind == "gone":
        store.delete(record.name)
    else:
        store.write(record.name, content[:-3000] if kind == "cut" else content[:600] + bytes(3000) + content[3600:])
    return record


def quarantine_entries(job, name="train"):
    return ShardQuarantine(ObjectStore(job.output_url), 0, folder=damage_folder(name)).entries()


def check_accounts(trained, lost, epochs=3):
    """Trained and lost utterances add up to complete epochs."""
    assert trained.result["utterances"] + trained.result["unreadable"] == epochs * 48
    assert trained.result["unreadable"] == lost
    lines = trained.entries("epoch")
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    assert all(line["utterances"] + line["unreadable"] == line["index"] == 48 for line in lines)
    assert sum(line["unreadable"] for line in lines) == lost
    assert trained.result["epoch"] == epochs


@pytest.mark.parametrize("kind", ["cut", "altered", "gone"])
@pytest.mark.variants(1)
def test_a_shard_damaged_before_the_start_is_left_out(corpus, speech, kind):
    record = damage(speech / "train", 1, kind)
    job = make_job(corpus, speech)
    trained = train_here(job)
    check_accounts(trained, 3 * record.count)
    (entry,) = quarantine_entries(job)
    assert (entry.shard, entry.utterances, entry.seconds) == (record.name, record.count, record.seconds)
    words = {"cut": "bytes instead of", "altered": "SHA-256 differs", "gone": "it is missing"}
    assert words[kind] in entry.reason


def test_schedule_follows_the_epochs_although_a_shard_is_lost(corpus, speech):
    options = {"schedule": {"kind": "cosine", "warmup_epochs": 0.5}, "max_unreadable": 0.9}
    for shard in (0, 2, 3):
        damage(speech / "train", shard)
    job = make_job(corpus, speech, **options)
    trained = train_here(job)
    check_accounts(trained, 3 * 30)
    steps = trained.entries("step")
    assert steps[-1]["epoch"] > 2.7
    assert steps[-1]["lr"] < 0.1 * max(step["lr"] for step in steps)
    assert all(step["loss"] > 0 for step in steps), "a step without anything to read has no loss to show"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_altered_during_the_run_is_left_out_afterwards(corpus, speech, layout):
    job = make_job(corpus, speech, epochs=6, **LAYOUTS[layout])
    with Running(job, slow=12) as running:
        running.wait_for_epoch(1)
        record = damage(speech / "train", 2)
        trained = running.finish()
    lost = trained.result["unreadable"]
    check_accounts(trained, lost, epochs=6)
    assert 3 * record.count <= lost < 6 * record.count
    assert [entry.shard for entry in quarantine_entries(job)] == [record.name]


def test_learner_fails_if_too_much_data_is_lost(corpus, speech):
    damage(speech / "train", 1)
    job = make_job(corpus, speech, max_unreadable=0.1)
    with pytest.raises(TooManyShardsError, match="10 of 48"):
        train_here(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*LAYOUTS.values(), {"strategy": "scpsgd", "learners_per_node": 2}], ids=["one", "two", "two ranks"]
)
def test_training_fails_without_retry_if_too_much_data_is_lost(corpus, speech, layout):
    record = damage(speech / "train", 1)
    job = make_job(corpus, speech, max_unreadable=0.1, **layout)
    with pytest.raises(TrainingFailedError, match=rf"status 3(?s:.)*more than the share of 0.1(?s:.)*{record.name}"):
        train(job)
    output = ObjectStore(job.output_url)
    assert not [name for name in output.list() if name.startswith("model") or name == "result.json"]
    for log in (speech.parent / "run").glob("node-*/node.log"):
        assert log.read_text().count(": weights initial") <= job.train.learners, "restarted"


def test_a_shard_of_the_validation_set_is_left_out(corpus, speech):
    record = damage(speech / "valid", 1)
    job = make_job(corpus, speech)
    trained = train_here(job)
    assert record.count == 2
    check_accounts(trained, 0)
    assert {entry["unreadable"] for entry in trained.result["history"]} == {2}
    assert {entry["valid_unreadable"] for entry in trained.entries("valid")} == {2}
    assert trained.result["valid"]["unreadable"] == 2
    assert [entry.shard for entry in quarantine_entries(job, "valid")] == [record.name]
    assert not quarantine_entries(job)


@pytest.mark.slow
def test_training_fails_if_too_much_of_the_validation_set_is_lost(corpus, speech):
    record = damage(speech / "valid", 0)
    job = make_job(corpus, speech)
    with pytest.raises(TrainingFailedError, match=rf"status 3(?s:.)*10 of 12 utterances(?s:.)*{record.name}"):
        train(job)
    assert not ObjectStore(job.output_url).exists("result.json")
    assert (speech.parent / "run" / "evaluator.log").read_text().count("10 of 12") == 1


class TestRemote:
    """The same shards on an S3 server, read through a local cache."""

    @pytest.fixture
    def job(self, corpus, speech, s3_server):
        urls = {f"{name}_url": f"s3://speech/{speech.parent.name}/{name}" for name in ("train", "valid")}
        for name in ("train", "valid"):
            for file in (speech / name).glob("*.*"):
                ObjectStore(urls[f"{name}_url"]).write_file(file.name, file)
        job = make_job(corpus, speech)
        return with_task(job, **urls)

    def copies(self, job):
        return {path.stem: path for path in job.cache.glob("*.tar")}

    def test_alteration_is_found_when_an_evicted_copy_is_fetched_again(self, job):
        dataset = open_set(job, "train")
        record = dataset.index.shards[1]
        first, second = dataset.batch([0, 1]), dataset.batch([10, 11])
        assert not first.unreadable + second.unreadable
        damage(job.task.train_url, 1)
        assert dataset.batch([10, 11]).ids == second.ids, "the copy is whole"
        self.copies(job)[record.sha256].unlink()
        again = dataset.batch([1, 10, 11])
        assert (again.ids, again.unreadable) == (["t001"], 2)
        assert [entry.shard for entry in quarantine_entries(job)] == [record.name]

    def test_damaged_copy_is_fetched_again(self, job):
        whole = open_set(job, "train").batch([10, 11])
        (copy,) = self.copies(job).values()
        content = copy.read_bytes()
        copy.write_bytes(content[:600] + bytes(3000) + content[3600:])
        dataset = open_set(job, "train")
        assert dataset.batch([10, 11]).ids == whole.ids
        assert copy.read_bytes() == content
        with copy.open("r+b") as file:
            file.truncate(600)  # in use: its size and digest have been looked at
        assert dataset.batch([10, 11]).ids == whole.ids
        with copy.open("r+b") as file:
            file.write(bytes(len(content)))
        assert dataset.batch([10, 11]).inputs.equal(whole.inputs)
        assert not quarantine_entries(job)

    @pytest.mark.slow
    def test_training_continues_if_copies_vanish_and_a_shard_is_altered(self, job):
        with Running(job.model_copy(update={"train": job.train.model_copy(update={"epochs": 6})}), slow=12) as running:
            running.wait_for_epoch(1)
            record = damage(job.task.train_url, 0, "cut")
            for path in self.copies(job).values():
                path.unlink()
            trained = running.finish()
        lost = trained.result["unreadable"]
        check_accounts(trained, lost, epochs=6)
        assert 3 * record.count <= lost < 6 * record.count
        assert [entry.shard for entry in quarantine_entries(job)] == [record.name]


def test_any_learner_can_check_whether_too_much_data_is_lost(corpus, speech):
    damage(speech / "train", 1)
    job = make_job(corpus, speech, max_unreadable=0.1)
    finder, other = (open_set(job, "train") for _ in range(2))
    other.check()
    with pytest.raises(TooManyShardsError):
        finder.batch([10])
    wait_until(lambda: quarantine_entries(job))
    with pytest.raises(TooManyShardsError, match="10 of 48"):
        other.check()
