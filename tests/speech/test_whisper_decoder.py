"""Whisper's decoder and tokenizer: the library's log probabilities, its files, prompts, and bad folders."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.decoding.hot_words import HotWordsConfig
from speech.models import WhisperDecoderConfig
from speech.models.networks.whisper_decoder import (
    load_whisper_decoder,
    read_whisper_decoder,
    read_whisper_tokenizer,
)
from speech.tokens import TokenError, tokenizer_from_dict

SIZES = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 24,
}
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startoflm|>", "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"]


def byte_pieces():
    """A byte-level tokenizer of a few pieces, with Whisper's special tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers, a part of transformers, is missing")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, "Ġh", "el", "Ġhel", "lo", "Ġhello"])}
    merges = [("Ġ", "h"), ("e", "l"), ("Ġh", "el"), ("l", "o"), ("Ġhel", "lo")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def write_decoder(folder, size=300, **changes):
    """A tiny Whisper decoder in Hugging Face's format, without a tokenizer."""
    (folder / "config.json").write_text(json.dumps({**SIZES, "vocab_size": size, **changes}))
    torch.manual_seed(1)
    network = WhisperDecoderConfig(dim=16, layers=2, heads=2, feed_forward=2, positions=24).build(16, size)
    weights = {f"model.decoder.{name}": tensor.half() for name, tensor in network.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"))


def write_folder(folder):
    """A tiny Whisper model with a tokenizer; returns the number of text tokens."""
    made = byte_pieces()
    write_decoder(folder, made.get_vocab_size() + 20)
    (folder / "tokenizer.json").write_text(made.to_str())
    return made.token_to_id("<|endoftext|>")


def library_model(folder):
    """A tiny model as transformers builds and stores it."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is missing")
    end = write_folder(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(3)
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": end + 1}
    sizes = {name: value for name, value in SIZES.items() if name != "model_type"}
    config = transformers.WhisperConfig(**sizes, **tokens, vocab_size=size, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():  # not nearly uniform
        model.model.decoder.layer_norm.weight.mul_(20)
    model.save_pretrained(folder)
    return model


def test_log_probabilities_are_the_librarys(tmp_path):
    model, network = library_model(tmp_path), load_whisper_decoder(tmp_path)
    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(3, 20, 16, generator=generator)
    tokens = torch.randint(network.vocab_size, (3, 9), generator=generator)
    with torch.no_grad():
        expected = model(encoder_outputs=(encoded,), decoder_input_ids=tokens).logits.log_softmax(-1)
        log_probs = network(tokens, encoded, torch.tensor([20, 20, 20]))
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
        weights = model(encoder_outputs=(encoded,), decoder_input_ids=tokens, output_attentions=True).cross_attentions
        if weights and weights[-1] is not None:
            attention = network.attention(tokens, encoded, torch.tensor([20, 20, 20]))
            torch.testing.assert_close(attention, weights[-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("suppressed", [{}, {"suppress_tokens": [3, 5, 70, 90], "begin_suppress_tokens": [10, 261]}])
def test_greedy_search_gives_the_tokens_of_the_librarys_generate(tmp_path, suppressed):
    model = library_model(tmp_path)
    from transformers.modeling_outputs import BaseModelOutput

    (tmp_path / "generation_config.json").write_text(json.dumps(suppressed))
    names = read_whisper_tokenizer(tmp_path)
    encoded = 3 * torch.randn(4, 20, 16, generator=torch.Generator().manual_seed(2))
    cfg = AttentionDecodeConfig(beam=1, tokens_per_frame=100, max_repeats=0, times="none")
    hypotheses = AttentionSearch(cfg, load_whisper_decoder(tmp_path), names)(encoded, torch.full((4,), 20))
    for name, value in suppressed.items():
        setattr(model.generation_config, name, value)
    start = torch.tensor([names.start]).expand(4, -1)
    expected = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
        input_features=torch.zeros(4, 8, 40),
        decoder_input_ids=start,
        attention_mask=torch.ones(4, 40),
        max_length=24,
        do_sample=False,
        num_beams=1,
    ).tolist()
    for hypothesis, tokens in zip(hypotheses, expected, strict=True):
        spoken = tokens[len(names.start) :] if tokens[: len(names.start)] == list(names.start) else tokens
        spoken = spoken[: spoken.index(names.end)] if names.end in spoken else spoken
        assert hypothesis.tokens[: len(spoken)] == spoken
        assert len(hypothesis.tokens) - len(spoken) in (0, 1)  # one place more is allowed, as the last one is not read
    assert any(hypothesis.tokens for hypothesis in hypotheses)


def test_pieces_are_the_bytes_of_texts(tmp_path):
    end = write_folder(tmp_path)
    tokenizer = read_whisper_tokenizer(tmp_path)
    pieces = tokenizer.pieces()
    assert pieces[end:] == [b""] * (tokenizer.size - end)
    for text in ("hello", "Élan’s 24 hellos, 北京!"):
        assert b"".join(pieces[token] for token in tokenizer.encode(text)).decode() == f" {text}"


def test_hot_words_are_found_in_written_texts(tmp_path):
    write_folder(tmp_path)
    tokenizer, network = read_whisper_tokenizer(tmp_path), load_whisper_decoder(tmp_path)
    encoded = 3 * torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for phrases in ((), ("Hello, O’Hel!",)):
        hot = HotWordsConfig(phrases=phrases, score=30.0)
        cfg = AttentionDecodeConfig(beam=4, times="none", hot_words=hot)
        hypotheses = AttentionSearch(cfg, network, tokenizer)(encoded, torch.full((2,), 20))
        found.append([" ".join(re.findall("[a-z']+", hypothesis.text.lower())) for hypothesis in hypotheses])
    assert all("hello o'hel" not in text for text in found[0])
    assert all("hello o'hel" in text for text in found[1])


def test_folder_of_half_precision_is_read_without_the_library(tmp_path):
    write_decoder(tmp_path)
    cfg, size, weights = read_whisper_decoder(tmp_path)
    assert cfg == WhisperDecoderConfig(dim=16, layers=2, heads=2, feed_forward=2, positions=24)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert load_whisper_decoder(tmp_path).vocab_size == size
    assert load_whisper_decoder(tmp_path).most_tokens == 24


def test_tokenizer_writes_what_it_reads_and_leaves_out_what_is_no_text(tmp_path):
    end = write_folder(tmp_path)
    names = read_whisper_tokenizer(tmp_path)
    for text in ("hello", "hello hello", "ha", "größer 3.5", "a <|en|> b"):
        tokens = names.encode(text)
        assert all(token < end for token in tokens)
        assert names.decode(tokens) == text
        assert names.decode([*names.start, *tokens, end + 15, names.end]) == text
    assert names.encode("hello") == [names.symbols.index("Ġhello")]
    assert names.encode("") == []
    assert [len(group) for group in names.word_groups(names.encode("hello ha ü"))] == [1, 2, 2]
    with pytest.raises(TokenError, match="is not text"):
        names.decode([names.size])


def test_text_is_preceded_by_what_is_asked_for(tmp_path, monkeypatch):
    end = write_folder(tmp_path)
    assert read_whisper_tokenizer(tmp_path).start == (end + 1, end + 9)  # few tokens: for English only
    monkeypatch.setattr("speech.tokens._MULTILINGUAL", 100)
    assert read_whisper_tokenizer(tmp_path).start == (end + 1, end + 2, end + 5, end + 9)
    german = read_whisper_tokenizer(tmp_path, language="de", task="translate", prompt=" hello  hello")
    hello = german.symbols.index("Ġhello")
    assert german.start == (end + 7, hello, hello, end + 1, end + 3, end + 4, end + 9)
    same = tokenizer_from_dict(json.loads(json.dumps(german.to_dict())))
    for tokenizer in (same, pickle.loads(pickle.dumps(german))):
        assert (tokenizer.start, tokenizer.end, tokenizer.symbols) == (german.start, german.end, german.symbols)
        assert tokenizer.encode("hello") == [hello]
    with pytest.raises(TokenError, match=r"no token <\|xx\|>.*de, en"):
        read_whisper_tokenizer(tmp_path, language="xx")
    with pytest.raises(TokenError, match="more than 223: shorten it"):
        read_whisper_tokenizer(tmp_path, prompt="hello " * 224)


def test_suppressed_tokens_and_timing_heads_are_those_of_the_folder(tmp_path):
    write_folder(tmp_path)
    generation = {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5], "alignment_heads": [[0, 1], [1, 0]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    names = read_whisper_tokenizer(tmp_path)
    assert (names.suppressed, names.suppressed_first) == ((3, 4), (5,))
    network = load_whisper_decoder(tmp_path)
    assert network.timing_heads == [(0, 1), (1, 0)]
    weights = network.attention(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 4, 16), torch.tensor([4]))
    assert weights.shape == (1, 2, 3, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [9999]}))
    with pytest.raises(TokenError, match="out of range"):
        read_whisper_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 7]]}))
    with pytest.raises(ValueError, match="head 7 of layer 0"):
        read_whisper_decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bart"}, "'bart', not 'whisper'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"decoder_ffn_dim": 40}, "no multiple of d_model"),
        ({"decoder_layers": "many"}, "config.json does not describe a Whisper decoder"),
        ({"d_model": None}, "config.json does not describe a Whisper decoder"),
        ({"decoder_layers": 3}, "lacks 24 of the decoder's weights"),
        ({"max_target_positions": 30}, r"is \(24, 16\), not \(30, 16\)"),
        ({"decoder_attention_heads": 3}, "must be a multiple of 2 x heads"),
    ],
)
def test_folder_that_is_no_whisper_decoder_is_refused_naming_what_is_wrong(tmp_path, changes, message):
    write_decoder(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_whisper_decoder(tmp_path)


def test_damaged_files_are_refused_naming_them(tmp_path):
    write_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as a Whisper model"):
        read_whisper_decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenError, match=r"tokenizer\.json of a Whisper model cannot be read"):
        read_whisper_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_whisper_decoder(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_whisper_decoder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "value", [{}, {"model": 3, "size": 9}, {"model": "{}", "size": "x"}, {"model": "{}", "size": 9}]
)
def test_damaged_tokenizer_is_refused(value):
    pytest.importorskip("tokenizers", reason="the package tokenizers, a part of transformers, is missing")
    with pytest.raises(TokenError):
        tokenizer_from_dict({"kind": "whisper", **value})
