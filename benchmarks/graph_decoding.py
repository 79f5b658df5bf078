"""What decoding with a graph costs, step by step and by the width of the search.

    python -m benchmarks.graph_decoding --config configs/mini_librispeech_hybrid.yaml --model models:/… --clips 24

Recognizes clips of the configuration's test set with one thread. Prints CPU seconds, real-time factor and WER of the
adaptation to speakers, of the network, of the best path by beam and number of states, and of lists of hypotheses that
are ranked again, by the widths of search and lattice; for the lists also the WER of their best hypotheses (oracle).
With `--reference N`, lattices and lists of the first N clips are also made by the tests' search in numpy: the results
must be equal to the bit, and the row has the ratio of CPU seconds, medians of three rounds in turn.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.silence import clip_arguments, load_clips, open_model
from recognition.recognizer import Adapter
from recognition.systems.acoustic import FrameRecognizer, Scores
from speech.decoding import GraphDecoder
from speech.decoding.graph import GraphConfig
from speech.hmm.lattice import LatticeOptions, LatticeSearch, best_paths, compile_search
from speech.hmm.priors import scaled_likelihoods
from speech.hmm.utterances import by_speaker
from speech.scoring.counts import score_utterance
from tasks.figures import percent

Row = dict[str, Any]
T = TypeVar("T")


class Measurement:
    """Clips, and a table that grows by a row for each step.

    Args:
        waves: Waveforms.
        said: Id, text and speaker of each.
        sample_rate: Hz.
    """

    def __init__(self, waves: Sequence[Tensor], said: Sequence[tuple[str, str, str]], sample_rate: int) -> None:
        self.waves, self.said = waves, said
        self.seconds = sum(map(len, waves)) / sample_rate
        self.rows: list[Row] = []

    def step(self, name: str, work: Iterable[T]) -> list[T]:
        """Do a step, which computes its results one by one, and add a row with what it cost."""
        began = time.process_time()
        results = list(work)
        cpu_s = time.process_time() - began
        self.rows.append({"step": name, "cpu_s": cpu_s, "real_time_factor": cpu_s / self.seconds})
        print(f"{name}: {cpu_s:.1f} s", file=sys.stderr, flush=True)
        return results

    def wer(self, texts: Sequence[Sequence[str]]) -> float:
        """Word error rate of the best of some hypotheses for each clip."""
        counts = [
            min((score_utterance(said, text) for text in hypotheses or [""]), key=lambda count: count.errors)
            for (_, said, _), hypotheses in zip(self.said, texts, strict=True)
        ]
        return sum(count.errors for count in counts) / sum(count.ref_words for count in counts)


def adapted(adapter: Adapter, measured: Measurement) -> Iterator[Tensor]:
    """Features of the clips, adapted to their speakers."""
    features: list[Tensor] = [torch.empty(0)] * len(measured.waves)
    for places in by_speaker([speaker for _, _, speaker in measured.said]).values():
        adapted_clips = adapter([measured.waves[place] for place in places])
        for place, clip in zip(places, adapted_clips, strict=True):
            features[place] = clip
    yield from features


def widths(cfg: GraphConfig, beams: Sequence[float], sizes: Sequence[int]) -> list[GraphConfig]:
    """The configuration with each beam and number of states."""
    return [cfg.model_copy(update={"beam": beam, "max_active": size}) for beam, size in product(beams, sizes)]


def measure_best_paths(
    decoder: GraphDecoder, measured: Measurement, outputs: Sequence[Scores], configs: Sequence[GraphConfig]
) -> None:
    """The best path with each configuration."""
    states = decoder.states
    assert states is not None
    likelihoods: list[NDArray[np.float32]] = [
        scaled_likelihoods(scores.log_probs[0].numpy(), states.log_priors, states.frame_factor) for scores in outputs
    ]
    for cfg in configs:
        search = decoder.search.with_options(cfg.options())
        paths = measured.step(f"best path, beam {cfg.beam:g}, {cfg.max_active:,} states", map(search, likelihoods))
        measured.rows[-1]["wer"] = measured.wer([[" ".join(path.words)] for path in paths])


def measure_lists(
    decoder: GraphDecoder, measured: Measurement, outputs: Sequence[Scores], configs: Sequence[GraphConfig]
) -> None:
    """The best of the ranked hypotheses with each configuration; the whole lists are made again, beside the clock."""
    for cfg in configs:
        ranked = decoder.with_config(cfg)
        ranked_first = measured.step(
            f"ranked list, beam {cfg.beam:g}, {cfg.max_active:,} states, lattice beam {cfg.lattice_beam:g}",
            (ranked.decode(scores.log_probs, scores.frames)[0] for scores in outputs),
        )
        row = measured.rows[-1]
        row["wer"] = measured.wer([[best.text] for best in ranked_first])
        listed = decoder.with_config(cfg.with_nbest(cfg.hypotheses))
        lists = [listed.decode(scores.log_probs, scores.frames)[0] for scores in outputs]
        row["oracle"] = measured.wer([[best.text, *(other.text for other in best.nbest)] for best in lists])


def measure_reference(decoder: GraphDecoder, measured: Measurement, outputs: Sequence[Scores]) -> None:
    """Lattices and lists as configured, by compiled code and by numpy; adds a row for each with the ratio."""
    states, cfg = decoder.states, decoder.cfg
    assert states is not None
    likelihoods = [
        np.ascontiguousarray(
            cfg.acoustic_scale * scaled_likelihoods(row.log_probs[0].numpy(), states.log_priors, states.frame_factor),
            dtype=np.float32,
        )
        for row in outputs
    ]
    reference = import_module("tests.speech.hmm.lattice_in_numpy")  # tests/ is no package of the project
    compile_search()
    graph, options = decoder.search.arrays(), LatticeOptions(cfg.beam, cfg.max_active, cfg.lattice_beam)
    searches = {"compiled": LatticeSearch(graph), "numpy": reference.LatticeSearch(graph)}
    ranking = {"compiled": best_paths, "numpy": reference.best_paths}
    costs: dict[tuple[str, str], list[float]] = {}
    for _ in range(3):
        lattices: dict[str, list[Any]] = {}
        lists: dict[str, list[Any]] = {}
        for kind in searches:
            search, rank = partial(searches[kind], options=options), ranking[kind]
            lattices[kind], lattice_s = clocked(search, likelihoods)
            lists[kind], list_s = clocked(
                partial(rank, limit=cfg.hypotheses, beam=cfg.lattice_beam), [one for one in lattices[kind] if one]
            )
            costs.setdefault(("lattices", kind), []).append(lattice_s)
            costs.setdefault((f"lists of {cfg.hypotheses}", kind), []).append(list_s)
        assert_same(lattices["compiled"], lattices["numpy"])
        for pair in zip(lists["compiled"], lists["numpy"], strict=True):
            assert_same(*pair)
    for (step, kind), seconds in costs.items():
        cpu_s = median(seconds)
        measured.rows.append({"step": f"{step}, {kind}", "cpu_s": cpu_s, "real_time_factor": cpu_s / measured.seconds})
        if kind == "numpy":
            measured.rows[-1]["ratio"] = cpu_s / median(costs[step, "compiled"])


def clocked(work: Callable[[Any], Any], items: Sequence[Any]) -> tuple[list[Any], float]:
    """Results of a function, and CPU seconds."""
    began = time.process_time()
    results = [work(item) for item in items]
    return results, time.process_time() - began


def assert_same(some: Sequence[Any], others: Sequence[Any]) -> None:
    """Attributes of all objects are equal to the bit."""
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        for name, value in vars(other).items() if other is not None else ():
            assert np.array_equal(getattr(one, name), value), name


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| step | CPU seconds | real-time factor | WER | oracle | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        rates = " | ".join(percent(row[name]) if name in row else "" for name in ("wer", "oracle"))
        ratio = f"{row['ratio']:.1f}" if "ratio" in row else ""
        lines.append(f"| {row['step']} | {row['cpu_s']:.1f} | {row['real_time_factor']:.3f} | {rates} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = clip_arguments(__doc__, 24, ())
    parser.add_argument("--beams", type=float, nargs="+", default=[8.0, 10.0, 12.0])
    parser.add_argument(
        "--reference", type=int, default=0, metavar="N", help="compare N clips with the search in numpy"
    )
    parser.add_argument("--states", type=int, nargs="+", default=[2000, 7000], help="most states of a frame")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        transcriber, run = open_model(options)
        recognizer = transcriber.recognizer
        assert isinstance(recognizer, FrameRecognizer)
        if not isinstance(recognizer.decoder, GraphDecoder):
            raise SystemExit("this model is not decoded with a graph: give --model one that is")
        decoder = recognizer.decoder
        waves, said = load_clips(run, options.test_set, options.clips, recognizer.spec.sample_rate)
        measured = Measurement(waves, said, recognizer.spec.sample_rate)
        decoder.prepare()
        decoder.search.nbest(np.zeros((1, decoder.num_outputs), dtype=np.float32), 1, 1.0)  # reads the graph once more
        inputs: Sequence[Tensor] = waves
        if recognizer.adapter is not None:
            inputs = measured.step("adaptation", adapted(recognizer.adapter, measured))
        outputs = measured.step(
            "network", (recognizer.encode(feats[None], torch.tensor([len(feats)])) for feats in inputs)
        )
        configs = widths(decoder.cfg, options.beams, options.states)
        measure_best_paths(decoder, measured, outputs, configs)
        if decoder.cfg.hypotheses > 1:
            narrower = decoder.cfg.model_copy(update={"lattice_beam": 0.75 * decoder.cfg.lattice_beam})
            measure_lists(decoder, measured, outputs, [*configs, narrower])
        if options.reference:
            some = Measurement(waves[: options.reference], said[: options.reference], recognizer.spec.sample_rate)
            measure_reference(decoder, some, outputs[: options.reference])
            measured.rows += some.rows
    if options.json:
        print(json.dumps({"seconds": measured.seconds, "rows": measured.rows}))
        return
    print(f"{len(waves)} clips, {measured.seconds:.0f} s of speech\n\n{table(measured.rows)}")


if __name__ == "__main__":
    main()
