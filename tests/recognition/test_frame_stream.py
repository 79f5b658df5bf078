"""Speech as it comes: a stream's results are those of the whole recording, its memory is bounded, segments end."""

import resource
from itertools import pairwise

import numpy as np
import pytest
import torch
from support import tiny_bundle

from recognition.bundle import BundleSpec
from recognition.frame_stream import EndpointConfig, FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from recognition.streaming import SegmentStream, StreamConfig, open_stream
from recognition.systems.acoustic import FrameRecognizer
from recognition.systems.transducer import TransducerRecognizer, TransducerSystem
from recognition.transcriber import Transcriber
from speech.audio import AudioError, ResampledStream, resample
from speech.decoding import BeamConfig, DecodeError, GreedyConfig, TokensConfig, TransducerDecodeConfig, WordsConfig
from speech.decoding.hot_words import HotWordsConfig
from speech.features import CmvnStats, LogMelConfig
from speech.models import BlstmConfig, ChunkConfig, ConformerConfig
from speech.tokens import TokenConfig, train_tokenizer
from speech.vad import EverythingConfig, build_vad

RATE = 8000
HOT = HotWordsConfig(phrases=("bad cab", "cede"), score=2.0)
TEXTS = ["a bad cab", "dab a bed", "cede"]
NO_ENDPOINT = EndpointConfig(after_speech_s=0, at_start_s=0, longest_s=3600)
MODEL = ConformerConfig(
    dim=16, layers=2, heads=2, kernel=5, feed_forward=2, channels=3, subsampling=4, chunk=ChunkConfig(left=8)
)


def recognizer(decode=None, tokens="characters", model=MODEL, blank=0.0, seed=0):
    """A recognizer whose random network is sure of what it says; `blank` is added to the blank's score."""
    spec = BundleSpec(
        sample_rate=RATE,
        features=LogMelConfig(num_mels=12),
        stats=CmvnStats(12).add(torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) - 5).to_dict(),
        tokenizer=train_tokenizer(TokenConfig(kind=tokens), TEXTS).to_dict(),
        model=model,
    )
    torch.manual_seed(seed)
    network = spec.build_model().eval()
    made = FrameRecognizer(spec, network, decode or GreedyConfig())
    heard = torch.from_numpy(speech(6.0, seed=9))[None]
    with torch.no_grad():
        network.output.weight.mul_(60)
        scores = network.outputs(*made.frontend(heard, torch.tensor([heard.shape[1]])))[0][0]
        network.output.bias -= scores.mean(0)  # else it says one token all the time
        network.output.bias[0] += blank
    return made


def speech(seconds, seed=0):
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.uniform(0.001, 0.4, round(seconds * 10) + 1), RATE // 10)[: round(seconds * RATE)]
    return (rng.normal(size=len(levels)) * levels).astype(np.float32)


def streamed(stream, samples, size):
    results = []
    for start in range(0, len(samples), size):
        results += stream.accept(samples[start : start + size])
    return [*results, *stream.finish()]


def assert_same(words, others):
    """Equal words at equal times; confidences are rounded."""
    assert [(word.word, word.start, word.duration) for word in words] == [
        (word.word, word.start, word.duration) for word in others
    ]
    assert [word.confidence for word in words] == pytest.approx([word.confidence for word in others], abs=1e-3)


@pytest.fixture(scope="module")
def lm_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.txt").write_text("a\nbad\ncab\ndab\nbed\ncede\n")
    lines = [
        f"-1.{number}\t{token}" for number, token in enumerate(["<s>", "</s>", "<unk>", "a", "b", "c", "d", "e", "▁"])
    ]
    (folder / "tokens.arpa").write_text("\\data\\\nngram 1=9\n\n\\1-grams:\n" + "\n".join(lines) + "\n\n\\end\\\n")
    return folder


def decoders(folder):
    return {
        "greedy": GreedyConfig(),
        "beam": BeamConfig(beam=8, nbest=3),
        "tokens": TokensConfig(lm=str(folder / "tokens.arpa"), beam=8),
        "words": WordsConfig(words=str(folder / "words.txt"), beam=32),
        "hot beam": BeamConfig(beam=8, hot_words=HOT),
        "hot words": WordsConfig(words=str(folder / "words.txt"), beam=32, hot_words=HOT),
    }


@pytest.mark.parametrize("kind", ["greedy", "beam", "tokens", "words", "hot beam", "hot words"])
@pytest.mark.parametrize("ms", [80, 160, 640])
def test_stream_finds_what_the_whole_recording_gives_with_the_same_chunks(kind, ms, lm_files):
    made, samples = recognizer(decoders(lm_files)[kind]), speech(3.0)
    made.model.offline_chunk = ms // 40
    encoded = made.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
    (expected,) = made.search(encoded)
    assert len(set(expected.tokens)) > 2
    if kind.startswith("hot"):
        assert expected.text != recognizer(decoders(lm_files)[kind.removeprefix("hot ")]).search(encoded)[0].text
    for size in (160, 5000, len(samples)):
        stream = FrameStream(made, FrameStreamConfig(chunk_ms=ms, endpoint=NO_ENDPOINT))
        *partial, final = streamed(stream, samples, size)
        assert (final.text, final.final, final.segment) == (expected.text, True, 0)
        assert not any(result.final for result in partial)
        times = made.times(encoded, 0, 0.0, 3.0)
        assert_same(final.words, made.timed_words(encoded, 0, expected, times))


@pytest.mark.parametrize("kind", ["greedy", "beam", "tokens", "words"])
@pytest.mark.parametrize("tokens", ["characters", "words"])
def test_search_that_goes_on_finds_what_the_search_of_all_frames_finds(kind, tokens, lm_files):
    """The whole hypothesis, whatever the parts are; and another search meanwhile does not disturb it."""
    if tokens == "words" and kind == "tokens":
        pytest.skip("the language model is of characters")
    decoder = recognizer(decoders(lm_files)[kind], tokens=tokens).decoder
    generator = torch.Generator().manual_seed(1)
    log_probs = (4 * torch.randn(1, 60, decoder.num_outputs, generator=generator)).log_softmax(-1)
    (expected,) = decoder.decode(log_probs, torch.tensor([60]))
    for size in (1, 7, 60):
        stream, other = decoder.stream(), decoder.stream()
        for start in range(0, 60, size):
            stream.accept(log_probs[0, start : start + size].numpy())
            other.accept(log_probs[0, 60 - size : 60].numpy())
            assert set(stream.best().text.split()) | {"a"}
            decoder.decode(log_probs[:, :9], torch.tensor([9]))
        assert stream.finish() == expected
    empty = decoder.stream()
    assert empty.best().text == empty.finish().text == ""


@pytest.mark.parametrize("own_rate", [RATE, 11025])
@pytest.mark.parametrize("ms", [80, 640])
def test_samples_that_complete_no_chunk_are_kept_and_the_others_give_results_at_once(ms, own_rate, monkeypatch):
    """Features and network compute once for a chunk, as soon as that is possible, whatever brings the samples."""
    made, samples = recognizer(), speech(4.0)
    cfg = FrameStreamConfig(chunk_ms=ms, endpoint=NO_ENDPOINT)
    stream, eager = FrameStream(made, cfg, own_rate), FrameStream(made, cfg, own_rate)
    monkeypatch.setattr(eager, "_next_chunk", lambda: 0)
    eager._due, computed, features = 0, [], stream._features.accept
    monkeypatch.setattr(stream._features, "accept", lambda wave: computed.append(len(wave)) or features(wave))
    sizes = np.random.default_rng(0).integers(1, 900, 200)
    for piece in np.split(samples, np.cumsum(sizes)):
        wanted, before = stream.wanted, len(computed)
        results = stream.accept(piece)
        assert results == eager.accept(piece)
        assert len(computed) - before == (len(piece) >= wanted)
    assert stream.finish() == eager.finish()
    chunks = 4000 / ms * RATE / own_rate
    assert chunks * 0.9 < len(computed) <= chunks + 1


def test_stream_wants_the_samples_of_a_chunk():
    stream = FrameStream(recognizer(), FrameStreamConfig(chunk_ms=640, endpoint=NO_ENDPOINT), 2 * RATE)
    first = stream.wanted
    assert 2 * 0.6 * RATE < first < 2 * 0.8 * RATE
    stream.accept(speech(0.1))
    assert first - stream.wanted == len(speech(0.1))
    assert stream.num_bytes > FrameStream(recognizer(), FrameStreamConfig(), 2 * RATE).num_bytes


def test_partial_results_change_and_their_changed_words_are_counted():
    stream = FrameStream(recognizer(), FrameStreamConfig(chunk_ms=160, endpoint=NO_ENDPOINT))
    results = streamed(stream, speech(6.0), 400)
    texts = [result.text.split() for result in results]
    assert all(before != after for before, after in pairwise(texts[:-1]))
    changed = 0
    for before, after in pairwise(texts):
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        changed += len(before) - same
    assert stream.changed_words == changed > 0
    assert stream.shown_words == len(texts[-1])
    assert [result.end_s for result in results] == sorted(result.end_s for result in results)


def scripted(stream, tokens):
    """Feed output frames: the token of each one, 0 for the blank."""
    size = stream._segment.search._tokenizer.size
    log_probs = torch.full((len(tokens), size), -20.0)
    log_probs[torch.arange(len(tokens)), torch.tensor(tokens)] = -1e-3
    return stream._searched(log_probs)


def test_silence_after_words_ends_a_segment_and_words_keep_their_times_in_the_stream():
    made = recognizer()
    a, space = (made.tokenizer.symbols.index(symbol) for symbol in ("a", "▁"))
    stream = FrameStream(made, FrameStreamConfig(endpoint=EndpointConfig(after_speech_s=0.4, at_start_s=0)))
    results = scripted(stream, [0] * 50 + [a] * 3 + [0] * 25 + [space, a] + [0] * 5)
    assert [(result.segment, result.text, result.final) for result in results] == [
        (0, "a", True),
        (1, "a", False),
    ]
    assert (results[0].start_s, results[0].end_s) == (0.0, 63 * 0.04)
    assert (results[0].words[0].start, results[0].words[0].duration) == (2.0, 0.12)
    # the second segment begins at the endpoint
    assert results[1].start_s == 63 * 0.04
    assert results[1].words[0].start == pytest.approx(79 * 0.04)
    assert [result.final for result in stream.finish()] == [True]


def test_silence_at_the_start_gives_no_result_and_starts_the_search_again():
    made = recognizer()
    a = made.tokenizer.symbols.index("a")
    stream = FrameStream(made, FrameStreamConfig(endpoint=EndpointConfig(after_speech_s=1, at_start_s=0.4)))
    assert scripted(stream, [0] * 25) == []
    (result,) = scripted(stream, [a])
    assert (result.segment, result.start_s) == (0, 20 * 0.04)


def test_longest_segment_ends_without_silence():
    made = recognizer()
    a = made.tokenizer.symbols.index("a")
    stream = FrameStream(made, FrameStreamConfig(endpoint=EndpointConfig(longest_s=0.8)))
    results = scripted(stream, [a, 0] * 30)
    assert [(result.segment, result.end_s) for result in results if result.final] == [(0, 0.8), (1, 1.6), (2, 2.4)]


def test_endpoints_do_not_depend_on_how_the_samples_come():
    made = recognizer(blank=2.0)
    cfg = FrameStreamConfig(chunk_ms=160, endpoint=EndpointConfig(after_speech_s=0.2, at_start_s=0.6, longest_s=1.5))
    samples = speech(12.0)
    finals = [
        [result for result in streamed(FrameStream(made, cfg), samples, size) if result.final] for size in (100, 9999)
    ]
    assert finals[0] == finals[1]
    assert len(finals[0]) > 2
    assert [result.segment for result in finals[0]] == list(range(len(finals[0])))


def test_silence_alone_has_no_results_and_an_empty_stream_neither():
    made = recognizer(blank=1000.0)
    assert streamed(FrameStream(made), np.zeros(3 * RATE, np.float32), 800) == []
    assert FrameStream(made).finish() == []


def test_integers_and_other_rates_are_heard_alike():
    made = recognizer()
    cfg = FrameStreamConfig(chunk_ms=160, endpoint=NO_ENDPOINT)
    wave = np.round(speech(3.0) * 32768).clip(-32768, 32767).astype(np.int16)
    expected = streamed(FrameStream(made, cfg), wave / np.float32(32768), 800)
    assert streamed(FrameStream(made, cfg), wave, 800) == expected
    high = resample(torch.from_numpy(speech(3.0)), RATE, 11025).numpy()
    finals = [
        streamed(FrameStream(made, cfg, sample_rate=11025), high, 700)[-1].text,
        streamed(FrameStream(made, cfg), resample(torch.from_numpy(high), 11025, RATE).numpy(), 700)[-1].text,
    ]
    assert finals[0] == finals[1]


@pytest.mark.parametrize(
    ("before", "after"), [(16000, 8000), (8000, 16000), (44100, 16000), (8000, 8000), (11025, 8000)]
)
@pytest.mark.parametrize("count", [0, 1, 1000, 20000])
def test_resampled_stream_is_the_resampled_recording(before, after, count):
    wave = torch.randn(count, generator=torch.Generator().manual_seed(0))
    expected = resample(wave, before, after)
    for size in (1000, 333, 50000):
        stream, kept = ResampledStream(before, after), 0
        parts = []
        for start in range(0, count, size):
            parts.append(stream.accept(wave[start : start + size]))
            kept = max(kept, len(stream._wave))
        parts.append(stream.accept(wave[:0], last=True))
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
        assert kept < 2000 + size


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((2, 100), np.float32), r"samples of shape \(2, 100\) .*give \[num_samples\]"),
        (np.full(100, np.nan, np.float32), "the stream has samples that are not finite"),
        (np.full(100, 30000.0), "full scale is 1"),
    ],
)
def test_what_is_no_audio_is_refused_and_the_stream_goes_on(samples, message):
    made, heard = recognizer(), speech(2.0)
    stream = FrameStream(made)
    with pytest.raises(AudioError, match=message):
        stream.accept(samples)
    assert streamed(stream, heard, 800) == streamed(FrameStream(made), heard, 800)


def test_finished_stream_is_refused():
    stream = FrameStream(recognizer())
    stream.finish()
    for call in (stream.finish, lambda: stream.accept(np.zeros(8))):
        with pytest.raises(ValueError, match="finished: begin another"):
            call()


def test_models_that_need_whole_utterances_are_refused_with_a_remedy(tmp_path):
    tiny_bundle(tmp_path)
    with pytest.raises(ValueError, match=r"model blstm was trained without model\.chunk"):
        FrameStream(Recognizer.load(tmp_path))
    plain = recognizer(model=MODEL.model_copy(update={"chunk": None}))
    with pytest.raises(ValueError, match=r"model conformer was trained without model\.chunk"):
        FrameStream(plain)
    assert not BlstmConfig().streams


def test_memory_of_a_long_stream_is_that_of_a_short_one():
    """What is kept, and what a segment holds: an hour is as much as a minute."""
    stream = FrameStream(recognizer(blank=2.0), FrameStreamConfig(chunk_ms=640, endpoint=EndpointConfig(longest_s=5)))
    samples, most = speech(10.24), []
    for _ in range(6):
        sizes = []
        for start in range(0, len(samples), 5120):
            stream.accept(samples[start : start + 5120])
            sizes.append((stream.num_bytes, stream._segment.frames))
        most.append(max(size for size, _ in sizes))
        assert max(frames for _, frames in sizes) <= 125
    assert most[-1] <= most[1]


@pytest.mark.slow
def test_ten_minutes_take_no_more_memory_than_one():
    stream = FrameStream(recognizer(blank=2.0), FrameStreamConfig(chunk_ms=640))
    samples = speech(10.0)
    peaks = []
    for _ in range(10):
        for _ in range(6):
            for start in range(0, len(samples), 5120):
                stream.accept(samples[start : start + 5120])
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[0] < 20_000  # KiB


def test_whole_recordings_are_recognized_with_full_context(tmp_path):
    """The same model offline: `model.chunk.offline` is 0."""
    from recognition.bundle import save_bundle

    made, samples = recognizer(), speech(3.0)
    save_bundle(tmp_path, made.spec, dict(made.model.state_dict()))
    (transcript,) = Transcriber(tmp_path, vad=EverythingConfig()).transcribe([samples], RATE)
    encoded = made.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
    assert transcript.text == made.search(encoded)[0].text
    assert FrameStream(Recognizer.load(tmp_path)).finish() == []


@pytest.mark.parametrize("ctc", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
def test_transducer_finds_in_a_stream_what_it_finds_in_the_whole_recording(ctc, beam):
    made, samples = transducer(TransducerDecodeConfig(beam=beam, nbest=min(3, beam)), ctc), speech(5.0)
    for ms in (80, 640):
        made.model.encoder.offline_chunk = ms // 40
        encoded = made.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
        (expected,) = made.search(encoded)
        assert len(set(expected.tokens)) > 2
        stream = FrameStream(made, FrameStreamConfig(chunk_ms=ms, endpoint=NO_ENDPOINT))
        *partial, final = streamed(stream, samples, 3000)
        assert final.text == expected.text
        assert len(partial) > 2
        assert_same(final.words, made.timed_words(encoded, 0, expected, made.times(encoded, 0, 0.0, 5.0)))


def test_transducer_ends_segments_and_starts_anew():
    made = transducer(TransducerDecodeConfig(beam=2), False)
    cfg = FrameStreamConfig(chunk_ms=160, endpoint=EndpointConfig(longest_s=2))
    finals = [result for result in streamed(FrameStream(made, cfg), speech(9.0), 1000) if result.final]
    assert [result.segment for result in finals] == list(range(len(finals)))
    assert len(finals) >= 4
    again = [result for result in streamed(FrameStream(made, cfg), speech(9.0), 77) if result.final]
    assert again == finals


def transducer(decode, ctc):
    """A transducer whose random network is sure of what it says, and says this and that."""
    spec = recognizer().spec.model_copy(update={"system": TransducerSystem(joint_dim=16, ctc=ctc), "decode": decode})
    torch.manual_seed(3)
    made = TransducerRecognizer(spec, spec.build_model().eval(), decode)
    heard = torch.from_numpy(speech(6.0, seed=9))[None]
    with torch.no_grad():
        encoder, output = made.model.joiner.encoder, made.model.joiner.output
        made.model.joiner.predictor.weight.mul_(0.2)
        encoder.weight.mul_(15)
        encoded = encoder(made.encode(heard, torch.tensor([heard.shape[1]])).encoded[0])
        encoder.bias -= encoded.mean(0)
        output.weight.mul_(20)
        output.bias -= output(torch.tanh(encoded - encoded.mean(0))).mean(0)
    return made


def test_decoder_of_whole_utterances_is_refused_with_a_remedy():
    decoder = recognizer().decoder
    decoder.cfg = decoder.cfg.model_copy(update={"kind": "graph"})
    with pytest.raises(DecodeError, match="decode.kind graph searches whole utterances: use greedy, beam"):
        super(type(decoder), decoder).stream()


def test_the_kind_of_stream_is_what_the_model_can_do():
    def opened(made, **settings):
        return open_stream(made, lambda wave, rate: None, build_vad(EverythingConfig()), cfg=StreamConfig(**settings))

    samples = speech(3.0)
    stream = opened(recognizer(), partial_s=0.16, silence_s=0.4, longest_s=2.0)
    assert isinstance(stream, FrameStream)
    assert (stream.cfg.chunk_ms, stream.cfg.endpoint.after_speech_s, stream.cfg.endpoint.longest_s) == (160, 0.4, 2)
    results = streamed(stream, samples, 800)
    assert {result.final for result in results} == {True, False}
    assert all(0 < result.confidence <= 1 for result in results if result.final)
    quiet = streamed(opened(recognizer(), partial_s=0, silence_s=0.4, longest_s=2.0), samples, 800)
    assert quiet
    assert all(result.final for result in quiet)
    whole = MODEL.model_copy(update={"chunk": None})
    assert isinstance(opened(recognizer(model=whole)), SegmentStream)
