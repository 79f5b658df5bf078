"""Decoding of words with a language model beside pyctcdecode: the same posteriors, ARPA file, words and beam.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install pyctcdecode==0.5.0 kenlm
    python -m benchmarks.decoding --peer /tmp/peer/bin/python --corpus $STARLING_SHARED_DATA/LibriSpeech

The posteriors are made, not recognized: frames of 40 ms in which the right character has the highest score but for some
noise, so that the search has work to do and needs no trained model. The language model is a trigram of the transcripts
of train-clean-5; the utterances are of dev-clean-5. Both decoders get one thread and take turns; times are CPU seconds,
without reading the language model.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from speech.decoding import Decoder, WordsConfig, build_decoder
from speech.lm import WORDS, NgramConfig, Sources, estimate
from speech.scoring import score_sets
from speech.text import NormalizerConfig, TextNormalizer
from speech.tokens import TokenConfig, Tokenizer, train_tokenizer

FRAME_S = 0.04
_LN10 = 2.302585092994046


def transcripts(folder: Path) -> list[str]:
    """Normalized transcripts below a folder of LibriSpeech's layout."""
    normalizer = TextNormalizer(NormalizerConfig())
    lines = [line for path in sorted(folder.rglob("*.trans.txt")) for line in path.read_text().splitlines()]
    return [normalizer(line.partition(" ")[2]) for line in lines]


def posteriors(text: str, tokenizer: Tokenizer, noise: float, seed: int) -> NDArray[np.float32]:
    """Log posteriors [frames, tokens] of an utterance: each character and a blank after it last one or two frames."""
    drawn = np.random.default_rng(seed)
    frames = [
        token for symbol in tokenizer.encode(text) for token in (symbol, 0) for _ in range(int(drawn.integers(1, 3)))
    ]
    scores = drawn.normal(0, noise, (len(frames), tokenizer.size))
    scores[np.arange(len(frames)), frames] += 6.0
    log_posteriors: NDArray[np.float32] = torch.from_numpy(scores).log_softmax(-1).float().numpy()
    return log_posteriors


def decode(decoder: Decoder, utterances: list[NDArray[np.float32]]) -> tuple[float, list[str]]:
    """CPU seconds, and the texts."""
    started = time.process_time()
    texts = [
        decoder.decode(torch.from_numpy(scores)[None], torch.tensor([len(scores)]))[0].text for scores in utterances
    ]
    return time.process_time() - started, texts


def peer_seconds(python: str, task: dict[str, Any]) -> dict[str, Any]:
    """The result of the peer's side."""
    script = Path(__file__).with_name("decoding_pyctcdecode.py")
    done = subprocess.run([python, str(script)], input=json.dumps(task), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def word_error_rate(references: list[str], texts: list[str]) -> float:
    """Over all utterances."""
    rows = [
        (str(n), reference, other, "", "") for n, (reference, other) in enumerate(zip(references, texts, strict=True))
    ]
    return float(score_sets(rows).wer or 0.0)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each beam and decoder."""
    torch.set_num_threads(1)
    references = transcripts(options.corpus / "dev-clean-5")[: options.utterances]
    training = transcripts(options.corpus / "train-clean-5")
    estimate(Sources(transcripts=training, protected=references), NgramConfig(order=3), folder)
    words = (folder / WORDS).read_text().split()
    tokenizer = train_tokenizer(TokenConfig(kind="characters"), [*training, *references])
    utterances = [posteriors(text, tokenizer, options.noise, n) for n, text in enumerate(references)]
    np.savez(folder / "posteriors.npz", **{f"{n:05}": scores for n, scores in enumerate(utterances)})
    labels = ["", *(" " if symbol == "▁" else symbol for symbol in tokenizer.symbols[1:])]
    rows = []
    for beam in options.beams:
        cfg = WordsConfig(lm=str(folder / "lm.arpa"), words=str(folder / WORDS), beam=beam, beam_tokens=0)
        common = {"labels": labels, "lm": cfg.lm, "words": words, "posteriors": str(folder / "posteriors.npz")}
        pruning = {"beam_width": beam, "beam_prune_logp": -cfg.beam_threshold, "token_min_logp": -20.0}
        task = common | pruning | {"alpha": cfg.lm_weight / _LN10, "word_score": cfg.word_score, "rounds": 1}
        decoder = build_decoder(cfg, tokenizer)
        decode(decoder, utterances[:1])  # reads the language model
        ours: list[float] = []
        peer: list[float] = []
        texts: list[str] = []
        theirs: list[str] = []
        for _ in range(options.rounds):
            seconds, texts = decode(decoder, utterances)
            ours.append(seconds)
            answer = peer_seconds(options.peer, task)
            peer += answer["seconds"]
            theirs = answer["texts"]
        audio = FRAME_S * sum(map(len, utterances))
        for name, taken, hypotheses in (("starling", ours, texts), ("pyctcdecode", peer, theirs)):
            median = statistics.median(taken)
            row = {"decoder": name, "beam": beam, "utterances_per_s": len(utterances) / median, "rtf": median / audio}
            row |= {"wer": word_error_rate(references, hypotheses), "speed": statistics.median(peer) / median}
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    figures = f"{row['utterances_per_s']:.1f} | {row['rtf']:.4f} | {100 * row['wer']:.1f} % | {row['speed']:.1f}"
    return f"| {row['decoder']} | {row['beam']} | {figures} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="Python of the environment with pyctcdecode.")
    parser.add_argument("--corpus", type=Path, required=True, help="Folder with train-clean-5 and dev-clean-5.")
    parser.add_argument("--utterances", type=int, default=50)
    parser.add_argument("--beams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--noise", type=float, default=2.0, help="Standard deviation of the scores' noise.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| decoder | beam | utterances/s per core | real-time factor | WER | speed |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"benchmark": "decoding", "rows": measure(options, Path(folder))}))


if __name__ == "__main__":
    main()
