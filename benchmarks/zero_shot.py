"""A pretrained Whisper that Starling has not trained, beside `generate` of transformers on the same audio.

    python -m benchmarks.zero_shot --model FOLDER --speech LibriSpeech/dev-clean-5 [--limit N]

Both hear 30 s with the silence after each utterance, search greedily in float32 on the CPU, and write English.
Starling's recognizer reads a bundle as a finished training makes it. Prints each utterance whose tokens differ, and
after each batch how many are the same so far, and both word error rates under one normalization: Whisper's own, whose
table of spellings is that of the model's folder (`normalizer.json`), if it has one.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from recognition.bundle import BundleSpec
from recognition.initial_weights import transfer_weights
from recognition.pretrained import read_pretrained
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionSystem
from speech.audio import decode_audio
from speech.decoding import AttentionDecodeConfig
from speech.features import WhisperLogMelConfig
from speech.models import WhisperConfig, WhisperDecoderConfig
from speech.models.pretrained import import_transformers
from speech.scoring import score_sets
from speech.tokens import Tokenizer
from storage.corpora.librispeech import LibriSpeechReader

RATE = 16000
BATCH = 8
"""Utterances that are computed at once."""
Said = tuple[str, str, str, Tensor]
"""Id, transcript, speaker and waveform of an utterance."""
Written = tuple[str, list[int]]
"""Text and tokens of a hypothesis."""
Transcribe = Callable[[list[Tensor]], list[Written]]
"""Writes what is said in waveforms."""
Normalize = Callable[[str], str]


def utterances(folder: Path, limit: int) -> list[Said]:
    """The first utterances of a LibriSpeech subset."""
    said: list[Said] = []
    for utterance in LibriSpeechReader(folder):
        if limit and len(said) == limit:
            break
        wave, rate = decode_audio(Path(str(utterance.audio)).read_bytes())
        assert rate == RATE, f"{utterance.audio} has {rate} Hz"
        said.append((utterance.id, utterance.text, utterance.speaker, wave))
    return said


def make_bundle(model: Path, folder: Path) -> None:
    """Write a bundle with the weights of a pretrained Whisper as they are."""
    cfg = WhisperConfig(source=str(model), silence="all")
    pretrained = read_pretrained(cfg, folder)
    sized = pretrained.sized(cfg)
    system = AttentionSystem(ctc=False, decoder_network=WhisperDecoderConfig()).of_pretrained(pretrained)
    source = system.pretrained_source(pretrained, pretrained.source_model(sized))
    assert source.tokenizer is not None, "Whisper's decoder has its tokens"
    features = WhisperLogMelConfig(tail=True, num_mels=sized.num_features)
    spec = BundleSpec(
        sample_rate=RATE,
        features=features,
        stats=None,
        tokenizer=source.tokenizer.to_dict(),
        model=sized,
        system=system,
        decode=AttentionDecodeConfig(beam=1, times="none"),
    )
    spec.save(folder, transfer_weights(source, spec, spec.build_model()).weights)


def starlings(model: Path) -> tuple[Transcribe, Tokenizer]:
    """What writes with Starling, and its tokenizer."""
    with TemporaryDirectory() as folder:
        make_bundle(model, Path(folder))
        recognizer = Recognizer.load(Path(folder))

    def transcribe(waves: list[Tensor]) -> list[Written]:
        lengths = torch.tensor([len(wave) for wave in waves])
        encoded = recognizer.encode(torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths)
        return [(hypothesis.text, list(hypothesis.tokens)) for hypothesis in recognizer.search(encoded)]

    return transcribe, recognizer.spec.build_tokenizer()


def librarys(model: Path, tokenizer: Tokenizer) -> Transcribe:
    """What writes with transformers, after the same prompt."""
    library = import_transformers()
    network = library.WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    extractor = library.WhisperFeatureExtractor(feature_size=network.config.num_mel_bins)
    start = list(tokenizer.start)

    def transcribe(waves: list[Tensor]) -> list[Written]:
        feats = extractor([wave.numpy() for wave in waves], sampling_rate=RATE, return_tensors="pt").input_features
        prompt = torch.tensor([start]).expand(len(waves), -1)
        # Whisper's own `generate` makes the prompt of a language, and needs the file generation_config.json for that
        rows = library.GenerationMixin.generate(
            network,
            feats,
            decoder_input_ids=prompt,
            do_sample=False,
            num_beams=1,
            max_length=network.config.max_target_positions,
        )
        written = []
        for row in rows[:, len(start) :].tolist():
            tokens = row[: row.index(tokenizer.end)] if tokenizer.end in row else row
            written.append((tokenizer.decode(tokens), tokens))
        return written

    return transcribe


def normalizer(model: Path) -> Normalize:
    """Whisper's normalization of English texts."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    spellings = model / "normalizer.json"
    normalize: Normalize = EnglishTextNormalizer(json.loads(spellings.read_text()) if spellings.is_file() else {})
    return normalize


def report(said: Sequence[Said], ours: Sequence[Written], theirs: Sequence[Written], normalize: Normalize) -> str:
    """Counts and word error rates of the utterances so far, as JSON."""
    rates = {}
    for who, written in (("starling", ours), ("transformers", theirs)):
        rows = [
            (name, normalize(text), normalize(hypothesis), speaker, "")
            for (name, text, speaker, _), (hypothesis, _) in zip(said, written, strict=True)
        ]
        rates[who] = score_sets(rows).wer
    pairs = list(zip(ours, theirs, strict=True))
    counts = {
        "utterances": len(said),
        "seconds": round(sum(len(wave) for *_, wave in said) / RATE),
        "same_words": sum(one[0].split() == other[0].split() for one, other in pairs),
        "same_tokens": sum(one[1] == other[1] for one, other in pairs),
    }
    return json.dumps(counts | {"wer": rates})


def main() -> None:
    """Compare both, and print the result after each batch as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with Whisper in Hugging Face's format")
    parser.add_argument("--speech", type=Path, required=True, help="folder with a subset of LibriSpeech")
    parser.add_argument("--limit", type=int, default=0, help="utterances; 0 for all")
    args = parser.parse_args()
    said, normalize = utterances(args.speech, args.limit), normalizer(args.model)
    by_starling, tokenizer = starlings(args.model)
    by_library = librarys(args.model, tokenizer)
    ours: list[Written] = []
    theirs: list[Written] = []
    for first in range(0, len(said), BATCH):
        waves = [wave for *_, wave in said[first : first + BATCH]]
        with torch.inference_mode():
            ours += by_starling(waves)
            theirs += by_library(waves)
        for (name, *_), own, other in list(zip(said, ours, theirs, strict=False))[first:]:
            if own[1] != other[1]:
                print(f"{name}\n  Starling:     {own[0]}\n  transformers: {other[0]}")
        print(report(said[: len(ours)], ours, theirs, normalize), flush=True)


if __name__ == "__main__":
    main()
