"""`--set epochs=10` was answered with "did you mean 'report'?"; the field is `train.epochs`."""

import pytest
from support import tiny_document, write_config
from typer.testing import CliRunner

from configurable.wording import nearest
from flows.cli.app import app
from speech.decoding import BeamConfig
from tasks.config.decoding import TuneConfig, tuned_space
from tasks.config.mistakes import all_fields
from tasks.config.pipeline import ConfigError, PipelineConfig, load_config


@pytest.mark.parametrize(
    ("assignment", "proposed"),
    [
        ("epochs=10", "'train.epochs' or 'lm_train.epochs'"),
        ("epoch=10", "'train.epochs' or 'lm_train.epochs'"),  # misspelled, too
        ("train.lr=0.1", "'train.optimizer.lr'"),  # the nearest section comes first
        ("model.learning_rate=0.1", "'train.optimizer.lr' or 'lm_train.optimizer.lr'"),
        ("optimizer.lr=0.1", "'train.optimizer' or 'lm_train.optimizer'"),
        ("data.speakers=[ann]", "'data.sources.0.speakers'"),
        ("split_by=utterance", "'data.split_by'"),
        ("train.epoch=10", "'epochs'"),  # a misspelled name that the section has
        ("modelx=blstm", "'model'"),
    ],
)
def test_field_of_another_section_is_proposed_with_its_path(tmp_path, assignment, proposed):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    field = assignment.partition("=")[0].removesuffix(".lr" if assignment.startswith("optimizer") else "=")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [assignment])
    assert f"{field}: there is no such field; did you mean {proposed}?" in str(caught.value)


def test_proposed_paths_are_those_of_fields():
    fields = set(all_fields(PipelineConfig))
    assert {"train.epochs", "register.model", "data.sources.0.synthesis.test", "model.heads", "lm.text.paths"} <= fields
    assert "train.epoch" not in fields


def test_misspelled_field_of_a_space_is_proposed():
    with pytest.raises(
        ValueError, match="tune.space: beam_treshold is not a number of .*; did you mean 'beam_threshold'"
    ):
        tuned_space(BeamConfig(), TuneConfig(space={"beam_treshold": [1.0]}))


def test_misspelled_constant_of_a_method_is_proposed():
    told = CliRunner().invoke(app, ["simulate", "--timing", "--strategy", "bmuf", "--option", "bmuf.taw=3"])
    assert "--option bmuf.taw: there is no such field; did you mean 'tau'?" in str(told.exception) + told.output


def test_names_are_compared_without_case_and_long_lists_are_shortened():
    assert nearest("GEORGE", ["theo", "george"]) == "; did you mean 'george'?"
    assert nearest("zzz", [f"s{n}" for n in range(1000)]).endswith("s19, … (1,000 in all)")
    assert nearest("zzz", []) == ""
