"""Attention models that begin with a pretrained Whisper: encoder, decoder network, tokens, and what is refused."""

import json

import numpy as np
import pytest
import torch
from support import load_beside, tiny_document

from recognition.data.dataset import SpeechDataset
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionSystem
from speech.audio import encode_flac
from speech.decoding import AttentionDecodeConfig
from speech.models import WhisperDecoderConfig
from speech.text import TextNormalizer
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.shards import Sample, build_index, write_shard
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, StageError
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import DECODE
from tasks.stages.features import FEATURES
from tasks.stages.initial import initial_model, system_config, transfer_initial
from tasks.stages.prepare import PREPARE
from tasks.stages.register import requirements
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, check_languages, make_spec

transformers = pytest.importorskip("transformers", reason="the package transformers is missing")
whisper = load_beside(__file__, "../speech/test_whisper_decoder.py")


def write_model(made):
    """Write a tiny Whisper model with its tokenizer, and with heads that follow the speech."""
    end = whisper.write_folder(made)
    size = json.loads((made / "config.json").read_text())["vocab_size"]
    sizes = {name: value for name, value in whisper.SIZES.items() if name != "model_type"} | {"num_mel_bins": 80}
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": end + 1}
    torch.manual_seed(4)
    config = transformers.WhisperConfig(**sizes | {"max_source_positions": 1500}, **tokens, vocab_size=size)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"suppress_tokens": [3], "alignment_heads": [[1, 0]]}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("whisper")
    write_model(made)
    return made


def document_of(folder, model=None, init="", **network):
    document = tiny_document()
    document["data"]["sample_rate"] = 16000
    document["features"] = {"kind": "whisper_logmel"}
    document["model"] = model or {"kind": "whisper", "source": str(folder)}
    document["recognizer"] = {"kind": "attention", "ctc": False, "decoder_network": {"kind": "whisper", **network}}
    document["train"] = document["train"] | {"objective": "attention", "init": init}
    document["decode"] = {"kind": "attention", "beam": 1}
    return document


def run_of(folder, monkeypatch, model=None, init="", **network):
    document = document_of(folder, model, init, **network)
    for name, value in (("set_digest", "digest"), ("train_stats", None), ("set_texts", ["hello ha"])):
        monkeypatch.setattr(f"tasks.stages.train.{name}", lambda *given, value=value: value)
    return Run(parse_config(document), "r")


def test_training_begins_with_the_encoder_the_decoder_network_and_the_tokens(folder, monkeypatch, tmp_path):
    run = run_of(folder, monkeypatch)
    spec = make_spec(run)
    assert isinstance(spec.system, AttentionSystem)
    assert spec.system.decoder_network == WhisperDecoderConfig(
        dim=16, layers=2, heads=2, feed_forward=2, positions=24, alignment_heads=((1, 0),)
    )
    tokenizer = spec.build_tokenizer()
    assert tokenizer.kind == "whisper"
    assert tokenizer.suppressed == (3,)
    transfer = transfer_initial(run, spec)
    assert (transfer.incomplete, transfer.left_out) == ((), ())
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).state_dict()
    for name in ("layers.1.encoder_attn.q_proj.weight", "embed_tokens.weight", "embed_positions.weight"):
        assert torch.equal(transfer.weights[f"decoder.{name}"], model[f"model.decoder.{name}"])
    name = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(transfer.weights[f"encoder.{name}"], model[f"model.encoder.{name}"])
    assert "tokenizers" in {line.partition("==")[0] for line in requirements(spec)}
    # the finished model needs its source no more
    spec.save(tmp_path / "bundle", transfer.weights)
    recognizer = Recognizer.load(tmp_path / "bundle", AttentionDecodeConfig(beam=1, times="attention"))
    wave = torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, 16000)).float()
    (hypothesis,) = recognizer.search(recognizer.encode(wave[None], torch.tensor([16000])))
    assert len(hypothesis.tokens) <= 50
    assert hypothesis.text == tokenizer.decode(hypothesis.tokens)


def test_untrained_model_writes_the_tokens_of_the_librarys_generate(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    document = document_of(folder, {"kind": "whisper", "source": str(folder), "silence": "all"})
    document["features"]["tail"] = True
    document["train"]["epochs"] = 0
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES, TRAIN, DECODE):
        stage.execute(run)
    found = [row["hyp"] for row in read_table(run.result("decode").store, "test.parquet")]
    assert any(found)
    assert found == [TextNormalizer().normalize(text) for text in found], "written as the transcripts"
    result = TRAIN.record(run)["result"]
    assert (result["epoch"], result["step"], result["trained_parameters"]) == (0, 0, 0)
    bundle = fetch_bundle(run.result("train").store, tmp_path / "bundle")
    cfg = AttentionDecodeConfig(beam=1, times="attention", max_repeats=0)
    recognizer = Recognizer.load(bundle, cfg)
    generator = torch.Generator().manual_seed(0)
    waves = [0.1 * torch.randn(samples, generator=generator) for samples in (32000, 11111)]
    lengths = torch.tensor([len(wave) for wave in waves])
    encoded = recognizer.encode(torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths)
    assert encoded.frames.tolist() == [1500, 1500]
    hypotheses = recognizer.search(encoded)
    feats = transformers.WhisperFeatureExtractor()(
        [wave.numpy() for wave in waves], sampling_rate=16000, return_tensors="pt"
    ).input_features
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    start, end = list(recognizer.tokenizer.start), recognizer.tokenizer.end
    rows = transformers.GenerationMixin.generate(
        model,
        feats,
        decoder_input_ids=torch.tensor([start, start]),
        do_sample=False,
        num_beams=1,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start[0],
        max_length=whisper.SIZES["max_target_positions"],
    )
    for row, (hypothesis, wave, wanted) in enumerate(zip(hypotheses, waves, rows.tolist(), strict=True)):
        tokens = wanted[len(start) :]
        assert list(hypothesis.tokens) == (tokens[: tokens.index(end)] if end in tokens else tokens)
        seconds = len(wave) / 16000
        words = recognizer.timed_words(encoded, row, hypothesis, recognizer.times(encoded, row, 0.0, seconds))
        assert words
        assert all(0 <= word.start <= word.start + word.duration <= seconds + 1e-3 for word in words)


def test_without_epochs_there_must_be_a_model_to_begin_with():
    document = tiny_document()
    document["train"]["epochs"] = 0
    with pytest.raises(ConfigError, match=r"train\.epochs is 0.* name a model in train\.init or model\.source"):
        parse_config(document)


def test_training_that_begins_with_such_a_model_needs_its_pretrained_one_no_more(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("speech.tokens._MULTILINGUAL", 100)
    run = run_of(folder, monkeypatch)
    spec = make_spec(run)
    spec.save(tmp_path / "bundle", transfer_initial(run, spec).weights)
    digests = set()
    for language in ("en", "de"):
        further = run_of(folder, monkeypatch, {"kind": "whisper"}, init=str(tmp_path / "bundle"), language=language)
        again = make_spec(further)
        assert again.model.encoder == spec.model.encoder
        assert again.system.decoder_network == spec.system.decoder_network.model_copy(update={"language": language})
        assert f"<|{language}|>" in [again.build_tokenizer().symbols[token] for token in again.build_tokenizer().start]
        transfer = transfer_initial(further, again)
        assert (transfer.incomplete, transfer.left_out) == ((), ())
        digests.add(initial_model(further).source.digest)
    assert len(digests) == 2  # another language is another training


def test_whole_whisper_may_be_named_by_train_init(folder, monkeypatch):
    spec = make_spec(run_of(folder, monkeypatch, {"kind": "whisper"}, init=str(folder)))
    own = make_spec(run_of(folder, monkeypatch))
    assert (spec.system, spec.tokenizer, spec.model.encoder) == (own.system, own.tokenizer, own.model.encoder)


def test_language_that_the_model_does_not_know_is_refused(folder, monkeypatch):
    monkeypatch.setattr("speech.tokens._MULTILINGUAL", 100)
    assert make_spec(run_of(folder, monkeypatch, language="de")).build_tokenizer().start[1:3] != ()
    with pytest.raises(StageError, match=r"no token <\|xx\|>"):
        make_spec(run_of(folder, monkeypatch, language="xx"))


def test_language_of_utterances_that_the_model_does_not_know_is_refused(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("speech.tokens._MULTILINGUAL", 100)
    store = ObjectStore(str(tmp_path))
    rows = {"text": "a", "speaker": "s", "domain": "d", "corpus": "c", "sample_rate": 16000, "num_frames": 8000}
    samples = [
        Sample(name, {"flac": encode_flac(torch.zeros(8000), 16000)}, rows | {"duration": 0.5, "language": language})
        for name, language in (("one", "de-CH"), ("two", "fr"))
    ]
    index = build_index([write_shard(store, "0.tar", samples, "flac")], {})
    index.write(store)
    monkeypatch.setattr("tasks.stages.train.set_url", lambda run, name: store.url)
    for language, refused in (("auto", True), ("de", False)):
        run = run_of(folder, monkeypatch, language=language)
        spec = make_spec(run)
        if not refused:
            check_languages(run, spec)
            continue
        with pytest.raises(StageError, match=r"the set train .*'fr' is none of .*Give the language of each source"):
            check_languages(run, spec)
        names = spec.build_tokenizer()
        data = SpeechDataset(index, ShardReader(store, index, tmp_path / "cache"), names, checked=True)
        batch = data.batch(np.arange(2))
        assert batch.languages == ["de-CH", "fr"]
        assert batch.part(slice(0, 1)).languages == ["de-CH"]


def test_model_without_a_tokenizer_is_refused(folder, monkeypatch, tmp_path):
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert not ObjectStore(str(tmp_path)).exists("tokenizer.json")
    with pytest.raises(StageError, match=r"recognizer: model\.source .*tokenizer\.json"):
        make_spec(run_of(tmp_path, monkeypatch))


def test_other_encoders_have_the_architecture_with_random_weights(folder, monkeypatch):
    run = run_of(folder, monkeypatch, {"kind": "tdnn", "dim": 24, "layers": 2, "bottleneck": 8, "prefinal": 12})
    assert system_config(run) == run.config.system


def test_ctc_beside_whispers_decoder_is_refused(folder):
    document = tiny_document(recognizer={"kind": "attention", "decoder_network": "whisper"}, decode="attention")
    document["train"] = document["train"] | {"objective": "attention"}
    with pytest.raises(ConfigError, match=r"have no blank, which CTC needs: set recognizer\.ctc to false"):
        parse_config(document)
