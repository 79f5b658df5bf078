"""Promotions and rollbacks that are killed at any point, or happen at the same time."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from registered import RUN, add, champion, former_champions
from support import ROOT, copy_database

from tasks.tracking.promotion import settle
from tasks.tracking.significance import Decision


class Killer:
    """Does promotions and rollbacks in processes that kill themselves, on copies of a registry; see kill_moves.py."""

    def __init__(self, folder, database):
        self.folder, self.database = folder, database
        command = [sys.executable, Path(__file__).with_name("kill_moves.py")]
        # without MLflow's address, which MLflow itself puts into the environment
        env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        env["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(
            command, env=env, cwd=folder.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def home(self, name):
        """A data folder with a copy of the registry."""
        folder = self.folder / name
        copy_database(self.database, folder / "mlflow" / "mlflow.db")
        return folder

    def ask(self, cases):
        """Run cases, each in a separate process."""
        self.process.stdin.write(json.dumps(cases) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def do(self, what, folder, **case):
        """Results of actions that are not killed, one after another."""
        answer = self.ask({"do": what, "home": str(folder), **case})
        assert answer["status"] == 0, answer
        return answer["said"]

    def deaths(self, what, **case):
        """Folders whose action was killed before, within or after its first, second, ... change of the registry."""
        for step in range(1, 60):
            for where in ("before", "within", "after"):
                folder = self.home(f"{what}-{step}-{where}")
                answer = self.ask({"do": what, "home": str(folder), "step": step, "where": where, **case})
                if not answer["killed"]:
                    assert answer["status"] == 0, answer
                    return
                yield folder
        raise AssertionError("it never ended")


def champions(folder):
    """The champions that a registry's database names: a killed process may have left it in any state."""
    with closing(sqlite3.connect(folder / "mlflow" / "mlflow.db")) as database:
        query = "select version from registered_model_aliases where name = 'm' and alias = 'champion'"
        return [str(version) for (version,) in database.execute(query)]


@pytest.fixture
def killer(api, home, tmp_path):
    """A registry with two champions one after the other, and two challengers that have not been compared."""
    former_champions(api, 2)
    add(api, count=2)
    killer = Killer(tmp_path / "killed", home / "mlflow" / "mlflow.db")
    yield killer
    killer.process.stdin.close()
    assert killer.process.wait(240) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_promotion_killed_anywhere_leaves_one_champion_and_resumes(killer):
    after = set()
    for deaths, folder in enumerate(killer.deaths("promote", version="4"), 1):  # noqa: B007 - the last one counts
        reigns = champions(folder)
        assert reigns in (["2"], ["4"]), folder.name
        after.add(reigns[0])
        before, promoted, state, *back = killer.do("state promote state rollback rollback", folder, version="4")
        assert before["waiting"] == ("4" if reigns == ["2"] else None), folder.name
        assert promoted, folder.name
        assert state == {"champion": "4", "previous": "2", "waiting": None}, folder.name
        assert back == ["2", "1"], folder.name
        assert champions(folder) == ["1"]
    assert deaths >= 36
    assert after == {"2", "4"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollback_killed_anywhere_leaves_one_champion(killer):
    after = set()
    for deaths, folder in enumerate(killer.deaths("rollback"), 1):  # noqa: B007 - the last one counts
        reigns = champions(folder)
        assert reigns in (["1"], ["2"]), folder.name
        after.add(reigns[0])
        moves = "rollback state" if reigns == ["2"] else "state"
        assert killer.do(moves, folder)[-1]["champion"] == "1", folder.name
    assert deaths >= 9
    assert after == {"1", "2"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", [False, True])
def test_concurrent_promotions_take_turns_despite_a_killed_process(killer, dies):
    folder = killer.home("two")
    cases = [{"do": "promote", "home": str(folder), "version": version, "seconds": 1.0} for version in "34"]
    cases[0]["dies"] = dies
    answers = killer.ask(cases)
    assert [answer["killed"] for answer in answers] == [dies, False]
    told = [line.split() for line in (folder / "judged").read_text().splitlines()]
    for (_, version, _), (end, same, _) in zip(told[::2], told[1::2], strict=False):
        assert dies or (end, same) == ("out", version)  # no other promotion in between
    assert len(champions(folder)) == 1
    if dies:
        assert champions(folder) == ["4"]
        assert ["out", "3", "2"] not in told
    else:
        assert told[2][2] == told[0][1]  # the second one had to beat the first
        assert champions(folder) == [told[2][1]]


@pytest.mark.slow
def test_concurrent_promotions_run_one_after_the_other(api, monkeypatch):
    former_champions(api, 1)
    add(api, count=2)
    inside, most, champions = [0], [0], []
    lock = threading.Lock()

    def decide(run, champion, added):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            champions.append(str(champion.version))
        time.sleep(0.2)
        with lock:
            inside[0] -= 1
        return Decision(True, "beats", str(champion.version))

    monkeypatch.setattr("tasks.tracking.significance.decide", decide)
    threads = [threading.Thread(target=settle, args=(api, RUN, "m", version)) for version in ("2", "3")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert most == [1]
    assert champions[0] == "1"
    assert champions[1] in ("2", "3")  # the second one had to beat the first
    assert champion(api) == ({"2", "3"} - {champions[1]}).pop()
