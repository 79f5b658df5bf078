"""`starling key`, and `starling train` as one node: sources of its options, and invalid ones."""

import json
import stat

import pytest
from support import tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from training.processes.keys import RingKey

ENVIRONMENT = ("STARLING_COORDINATOR", "STARLING_RING_KEY_FILE", "SLURM_NODEID", "JOB_COMPLETION_INDEX")


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture(autouse=True)
def clean(home, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("flows.cli.common.err.width", 300, raising=False)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "ring.key"
    RingKey.generate().save(path)
    return path


@pytest.fixture
def node(monkeypatch):
    """Arguments with which the node would have been started."""
    calls = []

    def run_node(*given):
        calls.append(given)
        return 0

    monkeypatch.setattr("training.node.agent.run_node", run_node)
    return calls


def test_key_is_created_once_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "keys" / "ring.key"
    printed = json.loads(invoke("key", path, "--json").stdout)
    made = RingKey.load(path)
    assert printed == {"file": str(path), "public": made.public.decode()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.secret.decode() not in json.dumps(printed)
    refused = invoke("key", path, code=1)
    assert str(path) in refused.stderr
    assert RingKey.load(path) == made
    long = tmp_path / ("long [name] " * 10)  # neither broken into lines nor read as markup
    assert f"{long}: copy it" in invoke("key", long).stdout


def test_node_uses_its_command_line_options(node, key, tmp_path):
    invoke("train", "--node-rank", 3, "--coordinator", "127.0.0.1:7100", "--key-file", key, "--bind", "127.0.0.2",
           "--advertise", "me", "--folder", tmp_path / "n", "--max-restarts", 0)  # fmt: skip
    assert node == [("127.0.0.1:7100", key, tmp_path / "n", 3, 0, "127.0.0.2", "me")]


def test_node_takes_other_options_from_the_environment(node, key, monkeypatch, home):
    monkeypatch.setenv("STARLING_COORDINATOR", "127.0.0.1:7100")
    monkeypatch.setenv("STARLING_RING_KEY_FILE", str(key))
    for name, rank in (("JOB_COMPLETION_INDEX", 2), ("SLURM_NODEID", 5)):
        monkeypatch.setenv(name, str(rank))
        invoke("train")
    folders = [str(home / "work" / f"node-{rank}-127-0-0-1-7100") for rank in (2, 5)]
    assert [(call[0], call[1], str(call[2]), *call[3:]) for call in node] == [
        ("127.0.0.1:7100", key, folders[0], 2, 3, "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:7100", key, folders[1], 5, 3, "127.0.0.1", "127.0.0.1"),
    ]


def test_command_ends_with_the_nodes_exit_status(key, monkeypatch):
    monkeypatch.setattr("training.node.agent.run_node", lambda *_: 75)
    invoke("train", "--node-rank", 0, "--coordinator", "127.0.0.1:1", "--key-file", key, code=75)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "give --node-rank and --coordinator, the node of a training; to train a",
        ),
        (["--node-rank", "0"], "--coordinator is missing"),
        (["--coordinator", "127.0.0.1:7100"], "--node-rank is missing"),
        (["--coordinator", "nonsense", "--node-rank", "0"], "--coordinator is 'nonsense': write HOST:PORT"),
        (["--coordinator", "head:7100", "--node-rank", "0"], "--key-file is missing"),
        (
            ["--coordinator", "head:7100", "--node-rank", "0", "--key-file", "{}/no"],
            "--key-file is {}/no, which is no file",
        ),
        (["--coordinator", "head:7100", "--node-rank", "0", "--key-file", "{}/bad"], "bad"),
        (["{}/c.yaml", "--node-rank", "0"], "c.yaml is no option of a node, which gets its configuration from"),
        (["--node-rank", "0", "--coordinator", "127.0.0.1:1", "--set", "a=1"], "--set is no option of a node"),
        (["--node-rank", "0", "--coordinator", "127.0.0.1:1", "--no-prefect"], "--no-prefect is no option of a node"),
    ],
)
def test_wrong_combination_names_the_option(words, message, tmp_path, node):
    write_config(tmp_path / "c.yaml", tiny_document())
    (tmp_path / "bad").write_text("no key")
    result = invoke("train", *(word.format(tmp_path) for word in words), code=1)
    assert message.format(tmp_path) in result.stderr
    assert node == []


@pytest.mark.parametrize("name", ["SLURM_NODEID", "JOB_COMPLETION_INDEX"])
def test_rank_from_a_launcher_must_be_a_number(name, monkeypatch, node):
    monkeypatch.setenv(name, "first")
    assert f"{name} is 'first'" in invoke("train", "--coordinator", "127.0.0.1:1", code=1).stderr


def test_negative_rank_prints_usage(node):
    assert "Usage:" in invoke("train", "--node-rank", -1, "--coordinator", "127.0.0.1:1", code=2).stderr
