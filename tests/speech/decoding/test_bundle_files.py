"""A bundle carries its decoder's language model and word list: checked, loadable anywhere, never files of others."""

import json
import shutil

import pytest
import torch
from support import write_arpa

from recognition.bundle import BundleError, BundleSpec, add_decoder, check_files, load_spec, own_decoder, save_bundle
from recognition.recognizer import Recognizer
from speech.decoding import BeamConfig, GreedyConfig, WordsConfig
from speech.decoding.hot_words import HotWordsConfig
from speech.features import LogMelConfig
from speech.models import ConformerConfig
from speech.tokens import TokenConfig, train_tokenizer


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(), ["one two three"]).to_dict(),
        model=ConformerConfig(dim=8, layers=1, heads=2, kernel=3, channels=2),
    )
    save_bundle(folder, spec, dict(spec.build_model().state_dict()))
    return folder


@pytest.fixture
def cfg(tmp_path):
    words = {"one": (-0.5, 0), "two": (-0.6, 0), "three": (-0.7, 0), "<s>": (-99, 0), "</s>": (-1, None)}
    (tmp_path / "words.list.txt").write_text("one\ntwo\n")
    lm = write_arpa(tmp_path / "news.arpa", words, {("one", "two"): -0.1})
    return WordsConfig(lm=lm, words=str(tmp_path / "words.list.txt"), beam=7)


def test_bundle_works_without_the_original_files(bundle, cfg, tmp_path):
    add_decoder(bundle, cfg)
    assert sorted(check_files(bundle)) == ["lm.arpa", "model.safetensors", "words.list.txt"]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(bundle, elsewhere)
    for path in (*cfg.files().values(), bundle / "lm.arpa"):
        (tmp_path / path).unlink()
    recognizer = Recognizer.load(elsewhere)
    assert recognizer.decoder.cfg == WordsConfig(
        lm=str(elsewhere / "lm.arpa"), words=str(elsewhere / "words.list.txt"), beam=7
    )
    waves = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)) / 10
    hypotheses = recognizer.search(recognizer.encode(waves, torch.tensor([4000, 3000])))
    assert {word for hypothesis in hypotheses for word in hypothesis.text.split()} <= {"one", "two"}


def test_bundle_has_the_hot_words_and_reads_them_in_the_form_of_its_transcripts(bundle, tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("Three  TWO!\t2\nOne\nzwölf\n")
    add_decoder(bundle, BeamConfig(hot_words=HotWordsConfig(file=str(file), phrases=("2",))))
    assert sorted(check_files(bundle)) == ["hot-words.txt", "model.safetensors"]
    file.unlink()
    recognizer = Recognizer.load(bundle)
    assert recognizer.cfg.hot_words.read() == [("two", 0.5), ("three two", 2.0), ("one", 0.5), ("zwolf", 0.5)]
    assert [phrase.text for phrase in recognizer.decoder._hot.phrases] == ["two", "three two", "one"]
    (bundle / "hot-words.txt").write_text("four\n")
    with pytest.raises(BundleError, match="hot-words.txt is damaged"):
        Recognizer.load(bundle)


def test_bundle_with_another_decoder_omits_the_first_ones_files(bundle, cfg):
    add_decoder(bundle, cfg)
    add_decoder(bundle, GreedyConfig())
    assert (sorted(check_files(bundle)), load_spec(bundle).decode) == (["model.safetensors"], GreedyConfig())


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_language_model_is_named(bundle, cfg, damage):
    add_decoder(bundle, cfg)
    lm = bundle / "lm.arpa"
    if damage == "missing":
        lm.unlink()
    else:
        lm.write_text(lm.read_text().replace("-0.5", "-0.4"))
    with pytest.raises(BundleError, match="lm.arpa is (damaged|missing)"):
        Recognizer.load(bundle)


def test_missing_files_are_named_before_anything_is_written(bundle, cfg):
    with pytest.raises(BundleError, match="decode.lm names /no/lm.arpa, which is not there"):
        add_decoder(bundle, cfg.model_copy(update={"lm": "/no/lm.arpa"}))
    assert load_spec(bundle).decode == GreedyConfig()


@pytest.mark.parametrize("name", ["/etc/hostname", "../words.list.txt", "other.txt"])
def test_bundle_never_reads_files_outside_itself(bundle, cfg, name):
    add_decoder(bundle, cfg)
    value = json.loads((bundle / "bundle.json").read_text())
    value["decode"]["words"] = name
    value["checksum"] = ""
    (bundle / "bundle.json").write_text(json.dumps(value))
    with pytest.raises(BundleError, match="decode.words, which is no file of the bundle"):
        own_decoder(bundle)
