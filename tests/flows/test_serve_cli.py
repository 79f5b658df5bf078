"""`starling serve` as a process: its options, its address, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import give_mlflow, load_beside, tiny_bundle, wait_until
from websockets.sync.client import connect

from flows.cli.serve import check_access, limits_of, open_model, opened_later
from tasks.tracking.runs import client

ROOT = Path(__file__).resolve().parents[2]
tones = load_beside(__file__, "../recognition/running_server.py")
cli = load_beside(__file__, "command_line.py")
registered = load_beside(__file__, "../tasks/registered.py")
TOKEN = "a-token-of-more-than-sixteen-characters"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    tiny_bundle(folder)
    return folder


class Running:
    """A server in a process of its own."""

    def __init__(self, home, *words, **environment):
        env = {**os.environ, "STARLING_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-m", "flows.cli.app", "serve", *map(str, words), "--port", "0", "--json"]
        self.errors = home / "errors"
        home.mkdir(exist_ok=True)
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        self.about = json.loads(line)
        self.url = self.about["url"]

    def end(self, number):
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(240)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def test_a_bundle_is_served_until_ctrl_c(bundle, tmp_path):
    import openai

    with Running(tmp_path / "home", bundle, "--limit", "file_mb=1") as server:
        assert server.about["model"] == "tiny"
        health = tones.fetch(f"{server.url}/healthz")[2]
        assert health["status"] == "ok"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.audio.transcriptions.create(file=("a.flac", tones.flac(tones.speak("echo"))), model="tiny")
        assert isinstance(answer.text, str)
        assert tones.fetch(f"{server.url}/v1/audio/transcriptions", bytes(2_000_000),
                           {"Content-Type": "multipart/form-data; boundary=x"})[0] == 413  # fmt: skip
        assert server.end(signal.SIGINT) == 0  # not that of the server's own limit
        lines = [json.loads(line) for line in Path(server.about["log"]).read_text().splitlines()]
        assert [line["event"] for line in lines if line["event"] != "segment"] == ["file", "rejected"]
        assert "Traceback" not in server.errors.read_text()


def test_doubtful_utterances_are_collected_if_that_is_wanted(bundle, tmp_path):
    words = ("--collect", tmp_path / "kept", "--collect-below", 1, "--vad", "energy")
    with Running(tmp_path / "home", bundle, *words) as server:
        assert server.about["collects"] == str(tmp_path / "kept")
        assert tones.fetch(f"{server.url}/healthz")[2]["collects"] is True
        body, headers = tones.form(tones.flac(tones.speak("echo")))
        assert tones.fetch(f"{server.url}/v1/audio/transcriptions", body, headers)[0] == 200
        server.end(signal.SIGINT)
    made = json.loads(cli.invoke("corpus", "collected", tmp_path / "kept", "--json").stdout)
    assert (made["new"], made["checked"]) == (1, 0)
    assert "0 new utterances of 1; 0 are checked" in cli.invoke("corpus", "collected", tmp_path / "kept").stdout


def test_sigterm_ends_an_open_stream_with_its_results(bundle, tmp_path):
    with Running(tmp_path / "home", bundle, "--vad", "energy") as server:
        with connect(server.url.replace("http", "ws") + "/stream?sample_rate=8000", proxy=None) as stream:
            assert json.loads(stream.recv(240))["type"] == "ready"
            stream.send(tones.pcm(tones.speak("echo alpha")))
            server.process.send_signal(signal.SIGTERM)
            heard = tones.messages(stream)
        assert heard[-1]["type"] == "done"
        assert server.process.wait(240) == 0
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{server.url}/healthz", timeout=240)


def test_a_killed_server_is_an_error_for_whoever_waits(bundle, tmp_path):
    import openai

    with Running(tmp_path / "home", bundle) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def ask():
            while True:  # again if it is recognized before the server is killed
                try:
                    client.audio.transcriptions.create(file=("a.flac", tones.flac(tones.silence(600))), model="tiny")
                except openai.APIConnectionError as error:
                    return error

        answer = tones.in_background(ask)
        wait_until(lambda: tones.fetch(f"{server.url}/healthz")[2]["files_waiting"] == 1)
        server.process.kill()
        assert isinstance(answer.result(), openai.APIConnectionError)


def test_a_token_of_the_environment_is_asked_for_and_shown_nowhere(bundle, tmp_path):
    home = tmp_path / "home"
    with Running(home, bundle, STARLING_SERVE_TOKEN=TOKEN) as server:
        assert tones.fetch(f"{server.url}/metrics")[0] == 401
        assert tones.fetch(f"{server.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in command
        server.end(signal.SIGINT)
    for path in home.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_an_alias_is_followed_and_a_version_is_not(home, tmp_path):
    give_mlflow(home)
    api = client()
    registered.add_bundle(api, tmp_path)
    api.set_registered_model_alias("m", "champion", "1")
    served, _ = open_model("m", "cpu", "energy")
    assert (served.switch.name, served.switch.current.version) == ("m", "1")
    api.set_registered_model_alias("m", "champion", registered.add_bundle(api, tmp_path))
    served.follower.look()
    assert served.switch.current.version == "2"
    fixed, _ = open_model("m/1", "cpu", "energy")
    assert (fixed.switch.name, fixed.switch.current.version, fixed.follower) == ("m", "1", None)
    with pytest.raises(ValueError, match="it has the model 'm'"):
        open_model("n", "cpu", "energy")
    for opened in (served, fixed):
        opened.switch.current.queue.close(10)
        opened.switch.current.discard()


def test_a_model_that_is_not_there_yet_is_waited_for(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flows.cli.serve._LOOK_S", 0.01)
    give_mlflow(home)
    api, stop = client(), threading.Event()
    opened = tones.in_background(opened_later, "m", "cpu", "energy", stop)
    wait_until(lambda: "waiting for m: " in capsys.readouterr().err)
    number = registered.add_bundle(api, tmp_path, damaged=True)
    api.set_registered_model_alias("m", "champion", number)
    wait_until(lambda: "is damaged" in capsys.readouterr().err)
    api.set_registered_model_alias("m", "champion", registered.add_bundle(api, tmp_path))
    served, _ = opened.result()
    assert served.switch.current.version == "2"
    served.switch.current.queue.close(10)
    served.switch.current.discard()
    stop.set()
    assert opened_later("n", "cpu", "energy", stop) is None
    with pytest.raises(ValueError, match="nor the name of a model"):
        opened_later("a b", "cpu", "energy", stop)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_listening_beyond_this_machine_needs_a_token(host):
    with pytest.raises(ValueError, match="set STARLING_SERVE_TOKEN"):
        check_access(host, None)
    check_access(host, TOKEN)


def test_this_machine_needs_no_token_and_a_short_one_is_refused():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_access(host, None)
    for token in ("short", "ä" * 20, "with a\nline break in it"):
        with pytest.raises(ValueError, match="openssl rand"):
            check_access("127.0.0.1", token)


def test_unknown_limits_and_values_are_explained():
    assert limits_of(["waiting=3", "file_mb=2.5"]).file_bytes == 2_500_000
    with pytest.raises(ValueError, match="there is no limit 'files'; there are file_mb, "):
        limits_of(["files=3"])
    for text in ("waiting=many", "waiting=2.5", "waiting="):
        with pytest.raises(ValueError, match="give a number, as in waiting=64"):
            limits_of([text])
    for text in ("waiting=0", "file_mb=-1", "file_mb=nan", "file_mb=inf"):
        with pytest.raises(ValueError, match="give a positive number"):
            limits_of([text])


def test_mistakes_are_one_message(bundle, home, monkeypatch):
    monkeypatch.delenv("STARLING_SERVE_TOKEN", raising=False)
    for words, message in [
        ((bundle, "--host", "0.0.0.0"), "set STARLING_SERVE_TOKEN"),
        ((bundle, "--port", "1", "--host", "192.0.2.1"), "set STARLING_SERVE_TOKEN"),
        ((bundle, "--vad", "ears"), "there is no such detector"),
        ((home, "--port", "0"), "is neither a folder nor the name of a model"),
    ]:
        result = cli.invoke("serve", *words, *(() if "--port" in words else ("--port", 0)), code=1)
        assert message in result.stderr.replace("\n", " ")
