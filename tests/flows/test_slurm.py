"""docs/slurm.md as it stands, on a Slurm cluster of two machines: its script, its commands, and what it promises."""

import json
import os
import re
import shutil
from functools import partial

import pytest
from support import ROOT, load_beside, starling, tiny_document, wait_until

from training.coordinator.journal import read_journal

slurm = load_beside(__file__, "slurm_site.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SIZES = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2"]
"""Instead of the page's four machines, with four GPUs and 16 processors for each node."""
EPOCHS, UTTERANCES = 12, 24
FOUR = {"0.0", "0.1", "1.0", "1.1"}
"""Learners: two on each machine."""
UNDER_WAY = ("PENDING", "RUNNING", "COMPLETING")
PATIENCE_S = 900.0


def page_script():
    """The batch script of the page."""
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    return script


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if reason := slurm.why_no_slurm():
        pytest.skip(reason)
    with slurm.slurm_site(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A user's home folder: the command, the page's script, a configuration, the key, and features."""
    home = tmp_path_factory.mktemp("made") / "home"
    slurm.install_starling(home / "bin")
    (home / "starling.sbatch").write_text(page_script())
    document = tiny_document("slurm")
    document["storage"] |= {"shard_seconds": 5}
    document["train"] |= {"epochs": EPOCHS, "checkpoint_steps": 2}
    (home / "config.json").write_text(json.dumps(document))
    starling("key", home / "starling" / "ring.key", home=home / "starling")
    starling("run", home / "config.json", "--no-prefect", "--until", "features", home=home / "starling")
    return home


class Job:
    """A job of the page's script.

    Args:
        site: The cluster.
        made: A home folder, which is copied.
        home: Where to.
        slow_step: Seconds that each step of training takes longer.
    """

    def __init__(self, site, made, home, slow_step=0):
        shutil.copytree(made, home)
        self.site, self.home, self.slow_step = site, home, slow_step
        self.submit()

    def submit(self):
        """The page's command."""
        environment = {
            "HOME": str(self.home),
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tests" / "flows" / "slowly"),
            "STARLING_TEST_SLOW_STEP": str(self.slow_step),
        }
        words = ["sbatch", *SIZES, "starling.sbatch", "config.json", "--set", "train.device=cpu"]
        self.number = self.site.command(*words, cwd=self.home, **environment).split()[-1]

    def journal(self, *kinds):
        """Entries of some kinds."""
        paths = self.home.glob("starling/work/train-*/journal.jsonl")
        return [entry for path in paths for entry in read_journal(path) if entry["kind"] in kinds]

    def epochs(self):
        """Of each epoch that has ended: utterances, and how many of them were trained more than once."""
        return [(entry["utterances"], entry["repeated"]) for entry in self.journal("epoch")]

    def wait_for_epoch(self, number):
        """Wait until an epoch has ended, in which both nodes have trained; the training goes on."""
        wait_until(lambda: len(self.epochs()) >= number or self.state() not in UNDER_WAY, PATIENCE_S)
        assert self.state() == "RUNNING", self.log()
        assert len(self.epochs()) < EPOCHS
        assert self.learners() == FOUR

    def learners(self, after=0):
        """Those that have trained in epochs after the first ones."""
        return {entry["learner"] for entry in self.journal("step") if entry["epoch"] > after}

    def state(self):
        """In Slurm's words."""
        return self.site.job(self.number)["JobState"]

    def ended(self):
        """Wait for the job's end; its state."""
        wait_until(lambda: self.state() not in UNDER_WAY, PATIENCE_S, 0.5)
        return self.state()

    def log(self):
        """What the job has printed."""
        return (self.home / f"starling-{self.number}.log").read_text()


@pytest.fixture
def start_job(site, made, tmp_path):
    """Starts a job; nothing of it is left after the test."""
    yield partial(Job, site, made, tmp_path / "home")
    site.recover()


STUB = """#!/bin/sh
case "$*" in
    *"--until features"*) {features} ;;
    *"--until train"*) exec tail -f /dev/null ;;
    "train --node-rank "*) exit 3 ;;
esac
"""
"""Instead of `starling`: a head that waits for nodes, which fail at once."""


@pytest.fixture
def start_stub(site, tmp_path):
    """Starts a job of the page's script for a stub, where ten minutes of sleep pass at once."""

    def start(features):
        made = tmp_path / "made"
        (made / "bin").mkdir(parents=True)
        (made / "starling.sbatch").write_text(page_script())
        for name, text in {"starling": STUB.format(features=features), "sleep": "#!/bin/sh\n"}.items():
            (made / "bin" / name).write_text(text)
            (made / "bin" / name).chmod(0o755)
        return Job(site, made, tmp_path / "home")

    yield start
    site.recover()


def check_completed(job, restarts=0, killed=False):
    """Check that the job ends, with every utterance trained once in each epoch, whatever happened on the way.

    What a killed node was training is trained again, and counted.
    """
    assert job.ended() == "COMPLETED", job.log()
    assert [utterances for utterances, _ in job.epochs()] == [UTTERANCES] * EPOCHS
    assert killed or sum(repeated for _, repeated in job.epochs()) == 0
    assert [entry["kind"] for entry in job.journal("start", "resume")] == ["start", *["resume"] * restarts]


def test_two_nodes_of_two_learners_train_and_the_model_is_registered(start_job):
    job = start_job()
    check_completed(job)
    assert job.learners() == FOUR
    size = ["--set", "train.strategy=h-adpsgd", "--set", "train.nodes=2", "--set", "train.learners_per_node=2"]
    words = ["run", "config.json", "--set", "train.device=cpu", *size]
    starling(*words, home=job.home / "starling", cwd=job.home)
    (record,) = job.home.glob("starling/objects/register/*/done.json")
    assert json.loads(record.read_text())["counts"] == {"version": 1, "promoted": 1}
    check_completed(job)  # it was not trained again


def test_training_continues_without_a_cancelled_node(site, start_job):
    job = start_job(slow_step=0.5)
    job.wait_for_epoch(2)
    site.command("scancel", site.steps(job.number)["node1"])
    wait_until(lambda: "node1" not in site.steps(job.number))
    check_completed(job, killed=True)
    assert job.learners(after=EPOCHS - 1) == {"0.0", "0.1"}


def test_training_continues_when_a_machine_is_lost(site, start_job):
    job = start_job(slow_step=0.5)
    job.wait_for_epoch(2)
    site.lose_machine(slurm.MACHINES[1])
    check_completed(job, killed=True)
    assert job.learners(after=EPOCHS - 1) == {"0.0", "0.1"}


def test_job_that_reaches_its_time_limit_is_requeued_and_resumes(site, start_job):
    job = start_job(slow_step=2.5)
    job.wait_for_epoch(1)
    hours, minutes, _ = map(int, site.job(job.number)["RunTime"].split(":"))
    site.command("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 3}")
    wait_until(lambda: site.job(job.number)["Restarts"] == "1", PATIENCE_S)
    site.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")  # else this limit would end it again
    assert 1 <= len(job.epochs()) < EPOCHS
    check_completed(job, restarts=1)


def test_cancelled_job_stays_cancelled_and_its_command_resumes(site, start_job):
    job = start_job(slow_step=0.5)
    job.wait_for_epoch(2)
    site.command("scancel", job.number)
    assert job.ended() == "CANCELLED"
    assert site.job(job.number)["Restarts"] == "0"
    job.submit()
    check_completed(job, restarts=1)


def test_head_ends_when_all_nodes_have_failed(start_stub):
    job = start_stub(features="exit 0")
    assert job.ended() == "FAILED"
    assert job.log().count("Exited with exit code 3") == 2


def test_job_that_reaches_its_time_limit_before_training_is_requeued(site, start_stub):
    job = start_stub(features="touch ready; exec tail -f /dev/null")
    wait_until((job.home / "ready").exists)
    site.command("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: site.job(job.number)["Restarts"] == "1")
