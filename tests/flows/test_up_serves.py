"""`starling up --serve` as a process: it waits for a champion, recognizes, comes back when killed, and drains."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support import ROOT, end_processes, give_mlflow, load_beside, processes_naming, wait_until

from flows.servers.services import free_port
from tasks.tracking.runs import client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
tones = load_beside(__file__, "../recognition/running_server.py")
registered = load_beside(__file__, "../tasks/registered.py")


def healthy(url):
    try:
        return tones.fetch(f"{url}/healthz")[2]
    except OSError:
        return None


def test_up_recognizes_with_the_champion_as_soon_as_there_is_one(home, tmp_path):
    give_mlflow(home)
    names = ("PREFECT_", "MLFLOW_", "STARLING_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli.app", "up", "--folder", str(home), "--json", "--serve", "m"]
    ports = [word for name in ("prefect", "mlflow", "serve") for word in (f"--{name}-port", str(free_port()))]
    (tmp_path / "cwd").mkdir()  # no configuration is here
    env["PYTHONPATH"] = str(ROOT)
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, *ports], cwd=tmp_path / "cwd", env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        line = process.stdout.readline()
        assert line, (tmp_path / "errors").read_text()
        url = json.loads(line)["urls"]["serve"]
        log = home / "logs" / "serve.log"
        wait_until(lambda: "waiting for m: " in log.read_text(), 120)
        assert healthy(url) is None
        api = client()
        api.set_registered_model_alias("m", "champion", registered.add_bundle(api, tmp_path))
        assert wait_until(lambda: healthy(url), 120)["model"] == "m"
        body, headers = tones.form(tones.flac(tones.speak("echo")), model="m")
        assert tones.fetch(f"{url}/v1/audio/transcriptions", body, headers, timeout=120)[0] == 200
        (server,) = [pid for pid in processes_naming(str(home)) if _words(pid)[3:5] == ["serve", "m"]]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: healthy(url) is None, 60)
        assert wait_until(lambda: healthy(url), 180)["version"] == "1"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert processes_naming(str(home)) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        end_processes(processes_naming(str(home)))


def _words(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return [word.decode() for word in file.read().split(b"\0")]
