"""`starling init --pretrained`: the configuration begins with that model, and is one that can run."""

import json

import pytest
from command_line import invoke
from support import load_beside

from tasks.config.pipeline import load_config
from tasks.stages import starter

pytest.importorskip("transformers", reason="the package transformers is missing")
recordings = load_beside(__file__, "test_init_cli.py")
attention = load_beside(__file__, "../tasks/test_attention_pretrained.py")
pretrained = load_beside(__file__, "../tasks/test_pretrained_training.py")
networks = load_beside(__file__, "../speech/test_pretrained_networks.py")
pytestmark = pytest.mark.usefixtures("wide", "home")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    recordings.with_table(tmp_path / "digits")
    return tmp_path


def written(here, *options):
    """The configuration, and what was printed."""
    shown = invoke("init", here / "digits", "--pretrained", here / "model", *options).stdout
    return load_config(here / "work" / "digits.yaml"), shown


def checked(*options):
    """What `starling config check` finds."""
    return invoke("config", "check", "digits.yaml", *options).stdout


def test_few_words_train_all_of_whisper(here):
    attention.write_model(here / "model")
    config, shown = written(here)
    assert "expect:  an error rate for these voices; for new ones it is often several times as high\n" in shown
    assert (config.model.kind, config.model.silence, config.model.source) == ("whisper", "none", str(here / "model"))
    assert (config.system.kind, config.system.decoder_network.language) == ("attention", "en")
    assert (config.data.sample_rate, config.data.min_seconds) == (16000, 0.1)
    assert config.train.augment.speed_factors[0] == 0.85
    assert config.restore is None
    assert not config.train.freeze
    assert "problem" not in checked()


@pytest.mark.parametrize(("hours", "epochs"), [(0.5, 3), (5.0, 1)])
def test_free_speech_trains_whispers_decoder_as_it_writes(here, monkeypatch, hours, epochs):
    monkeypatch.setattr(starter.Survey, "few_words", False)
    monkeypatch.setattr(starter.Survey, "training_hours", hours)
    attention.write_model(here / "model")
    config, shown = written(here, "--language", "de")
    assert "too little" not in shown  # the decoder is all that is trained
    assert (config.model.silence, config.features.tail, config.train.epochs) == ("all", True, epochs)
    assert config.restore is not None
    assert config.train.freeze[0].names == ("encoder.*",)
    assert config.system.decoder_network.language == "de"
    assert config.decode.beam == 5
    assert "problem" not in checked()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (5, 0), (64, 0)])
@pytest.mark.parametrize("few_words", [False, True])
def test_a_pretrained_whisper_uses_all_of_few_cores(here, monkeypatch, cores, threads, few_words):
    monkeypatch.setattr(starter, "usable_cores", lambda: cores)
    monkeypatch.setattr(starter.Survey, "few_words", few_words)
    attention.write_model(here / "model")
    config, _ = written(here)
    assert config.train.threads == threads


def test_whisper_without_its_tokenizer_gets_an_output_layer(here):
    pretrained.write_whisper(here / "model")
    config, _ = written(here)
    assert (config.model.kind, config.system.kind, config.tokens.kind) == ("whisper", "ctc", "words")
    assert config.train.new_lr == 20
    assert "problem" not in checked()


@pytest.mark.parametrize("normalize", [True, False])
def test_wav2vec2_reads_samples_as_its_preprocessor_does(here, normalize):
    networks.library_model("hubert").save_pretrained(here / "model")
    (here / "model" / "preprocessor_config.json").write_text(json.dumps({"do_normalize": normalize}))
    config, _ = written(here)
    assert (config.model.kind, config.features.kind, config.features.normalize) == ("wav2vec2", "waveform", normalize)
    assert config.train.augment.freq_masks == 0


def test_a_folder_that_is_no_model_is_named(here):
    failed = invoke("init", here / "digits", "--pretrained", here / "model", code=1)
    assert f"the pretrained model {here / 'model'} is not there" in failed.stderr


def test_new_voices_are_expected_only_where_some_are_tested_on(here):
    shown = invoke("init", here / "digits").stdout
    assert "for new ones it is often several times as high. A pretrained model helps: --pretrained FOLDER" in shown
    (here / "digits" / "labels.csv").unlink()
    rows = recordings.digits(here / "digits", speakers=[f"speaker-{n}" for n in range(8)], takes=3)
    table = "\n".join(",".join(row) for row in [("file", "label", "speaker"), *rows])
    (here / "digits" / "labels.csv").write_text(table + "\n")
    shown = invoke("init", here / "digits", "--force").stdout
    assert "expect:  an error rate for new voices: whole speakers are tested on\n" in shown
