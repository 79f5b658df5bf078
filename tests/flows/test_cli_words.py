"""What every command accepts: `-h`, `--version`, packaged configurations by name, completion, former names."""

import typing
from pathlib import Path

import pytest
import typer
from command_line import invoke
from typer.testing import CliRunner

import starling
from flows.cli.app import app
from flows.cli.configs import complete_config, complete_config_or_file, complete_path, packaged_configs

pytestmark = pytest.mark.usefixtures("wide")


def commands(group=None, names=()):
    """Every command with the words that name it."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name), command


ALL = dict(commands())


def test_version_option_prints_the_version():
    assert invoke("--version").stdout == f"starling {starling.__version__}\n"


@pytest.mark.parametrize("words", [(), ("storage",), *ALL], ids=" ".join)
def test_every_command_has_short_help_without_types_of_flags(words):
    shown = invoke(*words, "-h").stdout
    assert "Usage:" in shown
    assert "<bool>" not in shown


# --- configurations


@pytest.fixture
def executed(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder("flows.cli.run.finish")
    return recorder("flows.cli.run.execute", {})


def test_packaged_configuration_is_found_by_name(executed):
    invoke("run", "demo")
    assert executed[0][0].read_text().startswith("# The demo")


def test_file_but_not_folder_overrides_a_packaged_configuration(executed):
    Path("demo").mkdir()
    invoke("run", "demo")
    Path("fsdd").write_text("name: mine")
    invoke("run", "fsdd")
    assert [given[0] for given in executed] == [packaged_configs()["demo"], Path("fsdd")]


def test_unknown_configuration_name_lists_the_packaged_ones(executed):
    shown = " ".join(invoke("run", "dmeo", code=2).stderr.replace("│", "").split())
    assert "'dmeo' is neither a file nor a packaged configuration (demo, " in shown
    assert "did you mean 'demo'?" in shown
    assert executed == []


def test_options_accept_packaged_names(recorder):
    promoted = recorder("flows.cli.promote._promote", {"model": "m", "version": 1, "promoted": True, "reason": ""})
    invoke("promote", "--config", "demo")
    assert promoted[0][0] == "starling-demo"


# --- completion


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("mine.yaml", "data/deep.yml", "data/a.wav", ".hidden"):
        (tmp_path / name).touch()
    return tmp_path


def test_configurations_complete_to_packaged_names_yaml_files_and_folders(folder):
    assert list(complete_config("d")) == ["demo", "data/"]
    assert list(complete_config("m"))[-1] == "mine.yaml"
    assert list(complete_config("data/")) == ["data/deep.yml"]


def test_score_arguments_complete_to_packaged_names_and_any_file(folder):
    assert list(complete_config_or_file("d")) == ["demo", "data/"]
    assert list(complete_config_or_file("data/a")) == ["data/a.wav"]


def test_paths_complete_to_files_and_folders(folder):
    assert list(complete_path("")) == ["data/", "mine.yaml"]
    assert list(complete_path(".h")) == [".hidden"]
    assert list(complete_path(f"{folder}/data/a")) == [f"{folder}/data/a.wav"]
    assert list(complete_path("nowhere/x")) == []


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_any_file_completes(words, folder):
    hints = typing.get_type_hints(ALL[words].callback)
    for parameter in ALL[words].params:
        if "Path" in str(hints.get(parameter.name)):
            items = parameter.shell_complete(typer.Context(ALL[words]), "mi")
            assert "mine.yaml" in [item.value for item in items], f"{parameter.name} completes no file"


def test_shell_receives_the_completions(folder):
    shell = {"_STARLING_COMPLETE": "complete_bash", "COMP_WORDS": "starling run mine", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, [], env=shell, prog_name="starling").stdout.split() == ["mine.yaml"]


# --- defaults

NUMBERS = {
    "run folds": 0,
    "evaluate limit": 0,
    "align deviations": 5.0,
    "runs limit": 20,
    "transcribe nbest": 1,
    "transcribe chunk_ms": 640,
    "export chunk_ms": 640,
    "serve collect_below": 0.8,
    "serve collect_mb": 1000.0,
    "up serve_port": 8000,
    "transcribe rate": 0,
    "serve port": 8000,
    "serve follow_s": 15.0,
    "top every": 1.0,
    "simulate timeout_s": 5.0,
    "simulate parameters": 43_000_000,
    "simulate steps": 100,
    "simulate epochs": 0,
    "simulate border_mb": 8.0,
    "simulate step_s": 0.1,
    "simulate jitter": 0.0,
    "simulate per_machine": 1,
    "simulate link_gbit": 10.0,
    "simulate link_ms": 0.05,
    "simulate seed": 0,
    "plan parameters": 0,
    "plan step_s": 0.0,
    "plan overhead_s": 0.0,
    "plan batch_seconds": 0.0,
    "plan data_hours": 0.0,
    "plan nodes": 1,
    "plan gpus_per_node": 1,
    "plan link_gbit": 10.0,
    "plan link_ms": 0.05,
    "plan local_gbit": 200.0,
    "plan losses_per_day": 0.0,
    "plan restart_s": 60.0,
    "plan layers": 0,
    "plan border_mb": 0.0,
    "up prefect_port": 4200,
    "up mlflow_port": 5000,
    "up postgres_port": 5433,
    "up s3_port": 8333,
    "corpus inspect limit": 0,
    "storage gc min_age": 72.0,
}


def test_numbers_of_commands_have_these_defaults_and_flags_are_off():
    given = {
        f"{' '.join(words)} {parameter.name}": parameter.default
        for words, command in ALL.items()
        for parameter in command.params
    }
    assert {name: value for name, value in given.items() if type(value) in (int, float)} == NUMBERS
    assert [name for name, value in given.items() if value is True] == []
