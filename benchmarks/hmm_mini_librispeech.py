"""A GMM-HMM recognizer of mini-LibriSpeech, from audio to WER: monophones, triphones, LDA+MLLT, SAT.

    python -m benchmarks.hmm_mini_librispeech --arpa lm.arpa [--work FOLDER] [--stages mono tri lda sat] [--json]

Trains on train-clean-5, decodes dev-clean-5 (found by STARLING_SHARED_DATA) with CMUdict and an n-gram of words in
lower case, such as the pipeline's. Prints WER, CPU seconds and peak memory of each step. Use OMP_NUM_THREADS=1 for CPU
seconds that mean something. An interrupted run continues in its folder, but its CPU seconds are only those of the last
part.
"""

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from speech.audio import decode_audio
from speech.features import CmvnStats, MfccConfig, build_features
from speech.hmm.checkpoint import load_checkpoint
from speech.hmm.config import HmmConfig
from speech.hmm.decode import DecodeOptions, GraphPath, GraphSearch, decode_plain, decode_speaker
from speech.hmm.decoding_graph import word_graph
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graphs import GraphOptions, Lexicon
from speech.hmm.model import HmmModel
from speech.hmm.pronunciations import count_pronunciations, graph_options
from speech.hmm.topology import PhoneSet
from speech.hmm.train import STAGES, Trainer, TrainingProgress
from speech.hmm.utterances import InMemoryUtterance, by_speaker
from speech.scoring import score_sets

RATE = 16000
FEATURES = MfccConfig(num_mels=23, dither=0.0)
ROWS: list[dict[str, object]] = []


@contextmanager
def measured(name: str, **facts: object) -> Iterator[dict[str, object]]:
    """Measure a step: CPU seconds, wall seconds, peak memory so far."""
    row: dict[str, object] = {"step": name, **facts}
    cpu, wall = time.process_time(), time.monotonic()
    yield row
    row |= {"cpu_s": round(time.process_time() - cpu, 1), "wall_s": round(time.monotonic() - wall, 1)}
    row["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    ROWS.append(row)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def read_corpus(folder: Path) -> list[InMemoryUtterance]:
    """MFCC of a LibriSpeech folder, mean and variance normalized by speaker; words in lower case."""
    extract = build_features(FEATURES, RATE)
    texts = transcripts(folder)
    features: dict[str, Tensor] = {}
    stats: dict[str, CmvnStats] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".flac", ".opus")):
        wave = decode_audio(path)[0]
        features[path.stem] = extract(wave.unsqueeze(0), torch.tensor([len(wave)]))[0][0]
        stats.setdefault(path.stem.split("-")[0], CmvnStats(extract.dim)).add(features[path.stem])
    utterances = []
    for name, frames in features.items():
        own = stats[name.split("-")[0]]
        utterances.append(
            InMemoryUtterance(name, name.split("-")[0], (frames - own.mean) / own.std, tuple(texts[name].split()))
        )
    return utterances


def transcripts(folder: Path) -> dict[str, str]:
    """The transcripts of a LibriSpeech folder by utterance, in lower case, as the pipeline's language models are."""
    lines = (line for path in folder.rglob("*.trans.txt") for line in path.read_text(encoding="utf-8").splitlines())
    return {name: text.lower() for name, text in (line.split(" ", 1) for line in lines if line)}


def read_cmudict(path: Path) -> Lexicon:
    """Pronunciations by word, in lower case."""
    lexicon: dict[str, list[tuple[str, ...]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *phones = line.split("#")[0].split()
        lexicon.setdefault(re.sub(r"\(\d+\)$", "", word).lower(), []).append(tuple(phones))
    return lexicon


class Recognition:
    """Graphs of one lexicon and language model, and scores of what they recognize."""

    def __init__(
        self, phones: PhoneSet, lexicon: Lexicon, arpa: Path, options: DecodeOptions, spoken: GraphOptions | None = None
    ) -> None:
        self.options = options
        with measured("L o G") as row:
            self.graphs = word_graph(phones, lexicon, arpa, spoken)
            self.words = self.graphs.words
            row["words"] = len(self.words.words)

    def graph(self, name: str, model: HmmModel) -> FstArrays:
        """The decoding graph of a model."""
        with measured(f"{name}: graph") as row:
            graph = self.graphs.decoding_graph(model)
            row |= {"states": len(graph.finals), "arcs": len(graph.arcs), "mb": round(len(graph.arcs) * 16e-6)}
        return graph

    def score(self, name: str, model: HmmModel, test: list[InMemoryUtterance], passes: int) -> None:
        """Decode and print the WER after each pass."""
        decoder = GraphSearch(self.graph(name, model), self.words, self.options)
        seconds = sum(len(utterance.features) for utterance in test) / 100
        started = time.process_time()
        with measured(f"{name}: decode") as row:
            hypotheses = decoded(model, decoder, test, passes)
            row["wer"] = [round(100 * wer(test, paths), 2) for paths in hypotheses]
            row["rtf"] = round((time.process_time() - started) / seconds / (passes + 1), 3)


def decoded(model: HmmModel, decoder: GraphSearch, test: list[InMemoryUtterance], passes: int) -> list[list[GraphPath]]:
    """Hypotheses of all utterances after each pass."""
    if not passes:
        return [decode_plain(model, decoder, [utterance.features for utterance in test])]
    by_pass: list[dict[int, GraphPath]] = [{} for _ in range(passes + 1)]
    for places in by_speaker([utterance.speaker for utterance in test]).values():
        for number, paths in enumerate(decode_speaker(model, decoder, [test[i].features for i in places], passes)):
            for place, hypothesis in zip(places, paths, strict=True):
                by_pass[number][place] = hypothesis
    return [[paths[place] for place in range(len(test))] for paths in by_pass]


def wer(test: list[InMemoryUtterance], hypotheses: list[GraphPath]) -> float:
    """Word error rate, counted as sclite does."""
    rows = [
        (utterance.id, " ".join(utterance.words), " ".join(path.words), utterance.speaker, "dev")
        for utterance, path in zip(test, hypotheses, strict=True)
    ]
    return float(score_sets(rows).wer)


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arpa", type=Path, help="n-gram in lower case; without, models are not scored")
    parser.add_argument("--work", type=Path, default=Path("hmm-work"), help="checkpoints")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="which stages to score")
    parser.add_argument("--config", default="{}", help="changes to HmmConfig as JSON")
    parser.add_argument("--beam", type=float, default=DecodeOptions.beam)
    parser.add_argument("--scale", type=float, default=DecodeOptions.acoustic_scale)
    parser.add_argument("--passes", type=int, default=2, help="how often SAT adapts and decodes again")
    parser.add_argument("--limit", type=int, help="train on this many utterances only")
    parser.add_argument("--json", action="store_true", help="a line of JSON at the end")
    return parser.parse_args()


def show(progress: TrainingProgress) -> None:
    """A line for each iteration."""
    print(
        f"{progress.stage} {progress.iteration}/{progress.iterations}: {progress.log_likelihood:.3f} a frame, "
        f"{progress.gaussians} Gaussians, {progress.failures} failed, {progress.retried} retried, "
        f"{progress.seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    """Train, decode, print."""
    args = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data = Path(os.environ.get("STARLING_SHARED_DATA", "../shared/data"))
    with measured("features"):
        train = read_corpus(data / "LibriSpeech" / "train-clean-5")[: args.limit]
        test = read_corpus(data / "LibriSpeech" / "dev-clean-5")
    lexicon = read_cmudict(data / "lexicon" / "cmudict.dict")
    phones = PhoneSet.of(pronunciation for several in lexicon.values() for pronunciation in several)
    trainer = Trainer(train, lexicon, HmmConfig(**json.loads(args.config)), args.work, show, phones=phones)
    state = None
    for name in STAGES[: 1 + max(STAGES.index(stage) for stage in args.stages)]:
        with measured(f"{name}: train") as row:
            state = trainer.stage(name, state)
            row |= {"pdfs": state.model.gmm.num_pdfs, "gaussians": state.model.gmm.num_components}
    assert state is not None
    counts = count_pronunciations(
        state.aligned.alignments, {utterance.id: utterance.words for utterance in train}, phones
    )
    spoken = graph_options(counts, lexicon)
    del trainer, train, state
    if args.arpa:
        options = DecodeOptions(beam=args.beam, acoustic_scale=args.scale)
        recognition = Recognition(phones, lexicon, args.arpa, options, spoken)
        for name in args.stages:
            checkpoint = load_checkpoint(args.work / name)
            assert checkpoint is not None
            recognition.score(name, checkpoint.model, test, args.passes if name == "sat" else 0)
    if args.json:
        print(json.dumps({"benchmark": "GMM-HMM, mini-LibriSpeech", "argv": sys.argv[1:], "rows": ROWS}))


if __name__ == "__main__":
    main()
