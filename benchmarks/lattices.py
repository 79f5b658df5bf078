"""What several hypotheses cost and are worth: best path, lattices, n-best lists and ranking again.

    python -m benchmarks.hybrid_mini_librispeech --arpa lm.arpa --hmm hmm-work --work hybrid-work
    python -m benchmarks.lattices --arpa lm.arpa --second large.arpa --hmm hmm-work --work hybrid-work --json

Decodes dev-clean-5 with the hybrid benchmark's network, transforms and graph. Prints for each search its CPU seconds
and real-time factor, the WER of the best hypothesis, and the least WER that any choice from the list could have
(oracle); for each share of the second language model the WER after ranking the list again. Nothing is tuned here: the
table shows all shares. Use OMP_NUM_THREADS=1.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.hmm_mini_librispeech import ROWS, measured, read_corpus, wer
from benchmarks.hybrid_mini_librispeech import DATA, graph_of, network_scores, test_transforms
from speech.decoding.nbest import WordPath
from speech.decoding.rescoring import Rescorer
from speech.hmm.checkpoint import load_checkpoint
from speech.hmm.decode import DecodeOptions, GraphSearch, Hypothesis
from speech.hmm.utterances import Utterance
from speech.scoring.counts import score_utterance

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def oracle(test: Sequence[Utterance], lists: Sequence[Sequence[Hypothesis]], count: int) -> float:
    """Word error rate of the best choices among the first hypotheses of each list, in percent."""
    errors = words = 0
    for one, found in zip(test, lists, strict=True):
        counts = [score_utterance(" ".join(one.words), " ".join(hyp.words)) for hyp in found[:count]]
        errors += min((each.errors for each in counts), default=len(one.words))
        words += len(one.words)
    return round(100 * errors / words, 2)


def ranked(lists: Sequence[Sequence[Hypothesis]], rescorer: Rescorer, share: float) -> list[Hypothesis]:
    """The best hypothesis of each list, with a share of the second language model."""
    best = []
    for found in lists:
        paths = [WordPath(one.words, (), np.array([place]), -one.cost) for place, one in enumerate(found)]
        best.append(found[int(rescorer(paths, share, math.log(10))[0].path[0])])
    return best


def compare(
    args: argparse.Namespace, search: GraphSearch, test: list[Utterance], scores: Sequence[NDArray[np.float32]]
) -> None:
    """Best path, then lists of hypotheses from lattices of several widths."""
    seconds = sum(len(one) for one in scores) / 100
    with measured("best path") as row:
        best = [search(one) for one in scores]
        row["wer"] = round(100 * wer(test, best), 2)
    with measured("graph for lattices"):
        search.nbest(scores[0][:1], 1, 1.0)
    lists: list[list[Hypothesis]] = []
    for beam in args.lattice_beams:
        with measured("lattices and lists", lattice_beam=beam, nbest=args.nbest) as row:
            lists = [search.nbest(one, args.nbest, beam) for one in scores]
            row["hypotheses"] = round(sum(map(len, lists)) / len(lists), 1)
            row["wer"] = round(100 * wer(test, [one[0] for one in lists]), 2)
            row |= {f"oracle_{count}": oracle(test, lists, count) for count in (10, args.nbest)}
    for row in [row for row in ROWS if "wer" in row]:
        row["real_time_factor"] = round(float(str(row["cpu_s"])) / seconds, 3)
        print(f"{row['step']}: real-time factor {row['real_time_factor']} ({seconds:.0f} s of speech)")
    if args.second:
        with measured("reading the language models"):
            rescorer = Rescorer(str(args.arpa), str(args.second), search.words.words)
        for share in SHARES:
            with measured("ranking again", share=share) as row:
                row["wer"] = round(100 * wer(test, ranked(lists, rescorer, share)), 2)


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arpa", type=Path, required=True, help="the graph's n-gram")
    parser.add_argument("--second", type=Path, help="another n-gram of the same words")
    parser.add_argument("--hmm", type=Path, default=Path("hmm-work"), help="work folder of hmm_mini_librispeech")
    parser.add_argument("--work", type=Path, default=Path("hybrid-work"), help="work folder of hybrid_mini_librispeech")
    parser.add_argument("--utterances", type=int, default=0, help="decode every n-th utterance, about as many")
    parser.add_argument("--beam", type=float, default=12.0)
    parser.add_argument("--scale", type=float, default=0.1, help="acoustic scale")
    parser.add_argument("--lattice-beams", type=float, nargs="+", default=[4.0, 8.0])
    parser.add_argument("--nbest", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="a line of JSON at the end")
    return parser.parse_args()


def main() -> None:
    """Score the test set with the network, and compare searches."""
    args = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    checkpoint = load_checkpoint(args.hmm / "sat")
    assert checkpoint is not None, f"{args.hmm} has no model of stage sat"
    model = checkpoint.model
    test = read_corpus(DATA / "LibriSpeech" / "dev-clean-5")
    step = max(1, len(test) // args.utterances) if args.utterances else 1
    graph, table = graph_of(args, checkpoint)
    search = GraphSearch(graph, table)
    transforms = test_transforms(args.work, model, search, test)
    chosen = list(zip(test, transforms, strict=True))[::step]
    with measured("network: scores"):
        scores = network_scores(args.work, [model.chain(one.features, transform) for one, transform in chosen])
    options = DecodeOptions(beam=args.beam, acoustic_scale=args.scale)
    compare(args, search.with_options(options), [one for one, _ in chosen], scores)
    if args.json:
        print(json.dumps({"benchmark": "lattices, mini-LibriSpeech", "argv": sys.argv[1:], "rows": ROWS}))


if __name__ == "__main__":
    main()
