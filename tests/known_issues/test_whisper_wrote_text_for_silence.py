"""Whisper's decoder wrote a text for silence and noise, and its language had to be given.

The model says itself that there is no speech: text is left out if that is probable and the text is not (Radford et al.
2022, section 4.5). It also says which language it hears.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from support import load_beside

from recognition.bundle import BundleSpec
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionSystem, AttentionTask, AttentionTaskConfig
from recognition.transcriber import Transcriber
from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.features import WhisperLogMelConfig
from speech.models import TransformerDecoderConfig, WhisperConfig
from speech.models.networks.decoder import DecoderCache, DecoderNetwork
from speech.models.networks.whisper_decoder import read_whisper_tokenizer
from speech.tokens import TokenError, WhisperTokenizer
from speech.vad import EverythingConfig

whisper = load_beside(__file__, "../speech/test_whisper_decoder.py")
WIDTH = 6


class Scripted(DecoderNetwork):
    """Puts out given probabilities of tokens at each place behind the prompt, whatever it hears.

    Args:
        size: Tokens.
        opening: Probabilities by token behind the start of a transcript, for each utterance by its first value.
        text: Tokens with their probabilities, and the end.
        start: Tokens before the text.
    """

    def __init__(self, size, opening, text, start, place=0):
        super().__init__(TransformerDecoderConfig(), WIDTH, size)
        self.opening, self.text, self.before, self.place = opening, text, start, place

    def _next(self, place, heard):
        told = self.opening[heard] if place == self.place else {}
        if place >= self.before - 1:
            told = dict([self.text[min(place - self.before + 1, len(self.text) - 1)]])
        probs = torch.full((self.vocab_size,), (1 - sum(told.values())) / self.vocab_size)
        for token, value in told.items():
            probs[token] += value
        return probs.log()

    def start(self, encoded_BTD, frames):
        mask = encoded_BTD[:, :1, 0].round().long()
        return DecoderCache([], mask, [], 0)

    def step(self, tokens_BW, cache):
        rows = [self._next(cache.length, int(heard)) for heard in cache.frame_mask[:, 0]]
        log_probs = torch.stack(rows).unsqueeze(1).expand(-1, tokens_BW.shape[1], -1)
        return log_probs, DecoderCache([], cache.frame_mask, [], cache.length + 1)

    def forward(self, tokens_BL, encoded_BTD, frames):
        heard = encoded_BTD[:, 0, 0].round().long()
        places = range(tokens_BL.shape[1])
        return torch.stack([torch.stack([self._next(place, int(one)) for place in places]) for one in heard])

    def attention(self, tokens_BL, encoded_BTD, frames):
        return torch.full((len(frames), 1, tokens_BL.shape[1], encoded_BTD.shape[1]), 1 / encoded_BTD.shape[1])


@pytest.fixture
def several(monkeypatch):
    """A tokenizer of some languages."""
    monkeypatch.setattr("speech.tokens._MULTILINGUAL", 100)


def tokens(**asked):
    made = whisper.byte_pieces()
    return WhisperTokenizer.from_dict({"model": made.to_str(), "size": made.get_vocab_size(), **asked})


def frames(heard):
    """Frames of utterances by the number of what is heard in each."""
    return torch.tensor(heard, dtype=torch.float32)[:, None, None].expand(-1, 12, WIDTH), torch.tensor(
        [12] * len(heard)
    )


def searched(names, openings, likely, **fields):
    """What is recognized where the text's tokens have a probability."""
    text = [(token, likely) for token in (*names.encode("hello"), names.end)]
    net = Scripted(names.size, openings, text, len(names.start), names.opening)
    cfg = AttentionDecodeConfig(**{"beam": 1, "times": "attention", **fields})
    return AttentionSearch(cfg, net, names)(*frames(range(len(openings))))


@pytest.mark.parametrize(
    ("silence", "likely", "fields", "text"),
    [
        (0.7, 0.3, {}, ""),
        (0.5, 0.3, {}, "hello"),  # there may be speech
        (0.7, 0.45, {}, "hello"),  # the text is probable
        (0.7, 0.45, {"no_speech_log_prob": -0.5}, ""),
        (0.5, 0.3, {"no_speech": 0.4}, ""),
        (0.9, 0.3, {"no_speech": 1.0}, "hello"),
        (0.9, 0.2, {"beam": 3, "nbest": 2}, ""),
    ],
)
@pytest.mark.parametrize("prompt", ["", "lo"])
def test_text_is_left_out_where_silence_is_probable_and_the_text_is_not(silence, likely, fields, text, prompt):
    names = tokens(prompt=prompt)
    assert names.symbols[names.no_speech] == "<|nocaptions|>"
    speech, found = searched(names, [{}, {names.no_speech: silence}], likely, **fields)
    assert speech.text == "hello"
    assert found.text == text
    if not text:
        assert (found.tokens, found.word_frames, found.nbest) == ([], [], [])
        assert found.confidence == pytest.approx(silence, abs=0.01)
        assert found.score == pytest.approx(math.log(silence), abs=0.01)


def test_probability_of_the_text_is_that_of_the_tokens_that_are_not_suppressed():
    """Half of the probability is that of a suppressed token."""
    plain = tokens()
    openings = [{plain.no_speech: 0.9}]
    assert searched(plain, openings, 0.34)[0].text == ""
    names = tokens(suppressed=[plain.no_speech])
    net = Scripted(names.size, openings, [], len(names.start))
    text = [*names.encode("hello"), names.end]
    net._next = lambda place, heard: Scripted._next(net, place, heard) if place == 0 else half(place)

    def half(place):
        probs = torch.full((names.size,), 0.08 / names.size)
        probs[text[min(max(0, place - len(names.start) + 1), len(text) - 1)]] = 0.36
        probs[names.no_speech] = 0.3  # of the rest, the text has more than exp(-1)
        return (probs / (1 - 0.26)).log()

    (found,) = AttentionSearch(AttentionDecodeConfig(beam=1, times="none"), net, names)(*frames([0]))
    assert found.text == "hello"


def test_tokens_without_one_for_silence_have_no_such_rule():
    names = tokens()
    names.no_speech = None
    assert searched(names, [{}], 0.01)[0].text == "hello"


# --- languages


def test_each_utterance_gets_the_language_that_is_most_probable(several):
    names = tokens(language="auto", prompt="lo")
    assert set(names.languages) == {"en", "de"}
    heard = [{names.languages[code]: 0.4} for code in ("de", "en", "de")]
    read = []
    found = searched_languages(names, heard, read)
    assert [hypothesis.language for hypothesis in found] == ["de", "en", "de"]
    place = names.opening + 1
    assert read[place] == [[names.languages[code]] for code in ("de", "en", "de")]
    (fixed,) = searched(tokens(language="de"), [{}], 0.5)
    assert fixed.language == ""


def test_given_languages_are_taken_and_the_others_found(several):
    names = tokens(language="auto", prompt="lo")
    heard = [{names.languages[code]: 0.4} for code in ("de", "en", "de")]
    found = searched_languages(names, heard, [], ["en-GB", "", "de"])
    assert [hypothesis.language for hypothesis in found] == ["en", "en", "de"]


def searched_languages(names, heard, read, given=None):
    text = [(token, 0.5) for token in (*names.encode("hello"), names.end)]
    net = Scripted(names.size, heard, text, len(names.start), names.opening)
    step = net.step
    net.step = lambda tokens, cache: read.append(tokens.tolist()) or step(tokens, cache)
    return AttentionSearch(AttentionDecodeConfig(beam=1), net, names)(*frames(range(len(heard))), None, given)


def test_models_for_english_only_have_no_choice():
    names = tokens(language="auto")
    assert (names.languages, names.start) == ({}, tokens().start)


def test_training_reads_the_language_of_each_utterance(several):
    names = tokens(language="auto")
    before, behind = names.start[: names.opening + 1], names.start[names.opening + 2 :]
    assert names.start_of("de-CH") == (*before, names.languages["de"], *behind)
    for unknown in ("fr", ""):
        with pytest.raises(TokenError, match=f"'{unknown}' is none of the languages of the tokens"):
            names.start_of(unknown)
    assert tokens(language="de").start_of("fr") == tokens(language="de").start


def described(**asked):
    names = tokens(**asked)
    encoder = {"model_type": "whisper", "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 50}
    network = TransformerDecoderConfig(dim=16, layers=1, heads=2, dropout=0.0)
    return BundleSpec(
        sample_rate=16000,
        features=WhisperLogMelConfig(num_mels=20),
        stats=None,
        tokenizer=names.to_dict(),
        model=WhisperConfig(dim=16, layers=1, encoder=encoder),
        system=AttentionSystem(decoder_network=network, ctc=False),
    )


@pytest.mark.parametrize("sound", ["zeros", "noise"])
def test_silence_and_noise_have_no_words_but_the_detected_language(several, tmp_path, sound):
    pytest.importorskip("transformers")
    special = tokens(language="auto")
    spec = described(language="auto", suppressed=[special.no_speech, *special.languages.values()])
    names = spec.build_tokenizer()
    torch.manual_seed(1)
    made = spec.build_model()
    with torch.no_grad():
        made.decoder.output.weight.mul_(0.1)  # nothing is probable but silence, and German before English
        made.decoder.output.bias[names.no_speech], made.decoder.output.bias[names.languages["de"]] = 9.0, 2.0
        made.decoder.output.bias[names.encode("hello")] = 3.0
    spec.save(tmp_path, dict(made.state_dict()))
    noise = 0.1 * torch.randn(24000, generator=torch.Generator().manual_seed(0))
    wave = torch.zeros(24000) if sound == "zeros" else noise
    for fields, silent in (({}, True), ({"no_speech": 1.0}, False)):
        cfg = AttentionDecodeConfig(beam=1, max_repeats=2, **fields)
        (transcript,) = Transcriber(tmp_path, cfg, vad=EverythingConfig()).transcribe([wave])
        assert bool(transcript.text) != silent
        assert transcript.language == "de"


def test_what_the_decoder_network_reads_has_each_utterances_language(several):
    spec = described(language="auto")
    names = spec.build_tokenizer()
    task = AttentionTask(AttentionTaskConfig(spec=spec, train_url="memory://t", valid_url="memory://v"), 1)

    class Part:
        tokens, languages = torch.tensor([[5, 6], [7, 0]]), ["de", "en-GB"]

    read = task._read(Part(), torch.zeros(1))
    assert read.tolist() == [[*names.start_of("de"), 5, 6], [*names.start_of("en"), 7, 0]]


def test_training_predicts_the_language_behind_what_precedes_it(several):
    pytest.importorskip("transformers")
    spec = described(language="auto", prompt="lo")
    names, network = spec.build_tokenizer(), spec.build_model().eval()
    read = torch.tensor([[*names.start_of("en"), 5, 6]])
    encoded, counts = torch.randn(1, 4, network.width), torch.tensor([4])
    behind = network.decoder(read, encoded, counts)[:, [names.opening, *range(len(names.start) - 1, read.shape[1])]]
    assert torch.equal(network.outputs(encoded, counts, read), behind)
    assert names.opening > 0
    assert behind.shape[1] == 4  # the language, two tokens, the end


# --- real weights


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A bundle of Whisper base, from the folder that WHISPER_BASE names."""
    folder = Path(os.environ.get("WHISPER_BASE", ""))
    if not os.environ.get("WHISPER_BASE") or not (folder / "tokenizer.json").is_file():
        pytest.skip("WHISPER_BASE names no folder with Whisper's weights")
    from recognition.pretrained import read_pretrained
    from speech.models import WhisperDecoderConfig

    cfg = WhisperConfig(source=str(folder))
    pretrained = read_pretrained(cfg, tmp_path_factory.mktemp("cache"))
    sized = pretrained.sized(cfg)
    network = WhisperDecoderConfig(language="auto")
    system = AttentionSystem(decoder_network=network, ctc=False).of_pretrained(pretrained)
    source = system.pretrained_source(pretrained, pretrained.source_model(sized))
    features = WhisperLogMelConfig(num_mels=sized.num_features)
    spec = BundleSpec(
        sample_rate=16000,
        features=features,
        stats=None,
        tokenizer=source.tokenizer.to_dict(),
        model=sized,
        system=system,
    )
    made = spec.build_model()
    weights = made.state_dict() | made.own_names(source.weights())
    bundle = tmp_path_factory.mktemp("real")
    spec.save(bundle, weights)
    return bundle


def test_whisper_itself_writes_nothing_for_noise(real):
    """For digital silence, Whisper base writes "you" with a mean log probability of -0.56: the rule lets it pass."""
    assert read_whisper_tokenizer(Path(os.environ["WHISPER_BASE"])).no_speech is not None
    wave = 0.1 * torch.randn(1, 30 * 16000, generator=torch.Generator().manual_seed(0))
    for limit, silent in ((0.6, True), (1.0, False)):
        recognizer = Recognizer.load(real, AttentionDecodeConfig(beam=1, no_speech=limit))
        (hypothesis,) = recognizer.search(recognizer.encode(wave, torch.tensor([30 * 16000])))
        assert bool(hypothesis.text) != silent
