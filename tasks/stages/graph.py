"""Stage graph: the decoding graph (HCLG) of HMMs, a lexicon and a language model, made once for all later stages.

The stage runs only if something searches such a graph: decoder `graph` without a finished one, or `recognizer: gmm`.
The HMMs and their lexicon come from the stage `align`, the language model from the stage `lm`, unless the configuration
names files.
"""

import tempfile
from pathlib import Path
from typing import Any

from speech.decoding import GraphConfig
from speech.hmm.decoding_graph import WordGraphError, word_graph
from speech.hmm.graph_files import GRAPH as TRANSDUCER
from speech.hmm.graph_files import WORDS, save_graph, write_graph
from speech.hmm.model import ModelError, model_digest
from speech.hypotheses import DecodeError
from speech.lm.base import LmError
from speech.lm.kenlm import arpa_words
from storage.stages import StageOutput
from tasks.config.pipeline import RunnerConfig
from tasks.stages import progress
from tasks.stages.align import AlignmentModel
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.decoder_files import FilesRecord, file_digest, publish_files
from tasks.stages.lm import LM
from tasks.stages.runner import Piece, Workers

_SMALL = 1_000_000
"""Bytes of a language model whose graph is made in this process: that takes less time than another process needs to
start. Larger ones keep the interpreter for minutes, and the run's threads must renew its locks."""


def _named(run: Run) -> dict[str, str]:
    """Files that the configuration names, by field."""
    return run.config.decoder.files()


def _field(run: Run) -> str:
    """The field that names the language model's file, or the section that makes it."""
    if "lm" not in _named(run):
        return "lm"
    return "decode.lm" if run.config.decoder is run.config.decode else "align.recognize.arpa"


def _lm_digest(run: Run) -> str:
    if named := _named(run).get("lm"):
        return file_digest(named, _field(run))
    made = LM.record(run)
    return made["sha256"][made["files"]["lm"]]


def _inputs(run: Run) -> Inputs:
    named, digests = _named(run), {"language model": _lm_digest(run)}
    if "hmm" not in named:
        return {}, digests | {"align": run.result("align").key}
    digests |= {name: file_digest(named[name], f"decode.{name}") for name in ("hmm", "lexicon")}
    try:
        digests["hmm"] = model_digest(Path(named["hmm"]).parent)
    except (OSError, ModelError) as error:
        raise StageError(f"decode.hmm: {error}") from error
    return {"silence_probability": _silence(run)}, digests


def _silence(run: Run) -> float:
    """Probability of silence between two words; of graphs from the HMMs of a file."""
    decode = run.config.decoder
    assert isinstance(decode, GraphConfig)
    return decode.silence_probability


def _work(run: Run, output: StageOutput) -> FilesRecord:
    progress.report("graph", 0, 1, "composing the decoding graph")
    named = _named(run)
    with tempfile.TemporaryDirectory(prefix="starling-graph-") as folder:
        arpa = named.get("lm") or _fetch_lm(run, Path(folder))
        piece: Piece = {
            "align": "" if "hmm" in named else run.result("align").url,
            "hmm": named.get("hmm", ""),
            "lexicon": named.get("lexicon", ""),
            "silence_probability": _silence(run) if "hmm" in named else None,
            "lm": arpa,
            "field": _field(run),
            "folder": folder,
        }
        made = _made(run, piece)
        published = publish_files(output, (Path(folder) / name for name in (TRANSDUCER, WORDS)))
        return {"counts": made["counts"], "files": {"graph": TRANSDUCER, "words": WORDS}, **published}


def _fetch_lm(run: Run, folder: Path) -> str:
    return str(run.result("lm").output.fetch(LM.record(run)["files"]["lm"], folder))


def _made(run: Run, piece: Piece) -> dict[str, Any]:
    """What `graph_piece` returns."""
    if Path(piece["lm"]).stat().st_size < _SMALL or run.store.protocol == "memory":
        return graph_piece(piece)
    with Workers(RunnerConfig(kind="processes", workers=1), traced=False) as workers:
        made: dict[str, Any] = next(iter(workers.map("tasks.stages.graph:graph_piece", [piece], "graph")))
        return made


def graph_piece(piece: Piece) -> dict[str, Any]:
    """Make the graph that a piece describes, in its folder; returns the counts of the stage's record.

    Raises:
        StageError: The language model is damaged, or none of its words has a pronunciation.
    """
    folder = Path(piece["folder"])
    try:
        if piece["hmm"]:
            hmm, lexicon, lm = (Path(piece[name]) for name in ("hmm", "lexicon", "lm"))
            return {"counts": write_graph(hmm, lexicon, lm, folder, piece["silence_probability"])}
        model = AlignmentModel.fetch(StageOutput.at(piece["align"]), folder / "align")
        pronunciations = model.pronunciations(arpa_words(piece["lm"]))
        words = word_graph(model.model.tree.phones, pronunciations, Path(piece["lm"]), model.spoken)
        return {"counts": save_graph(words, model.model, folder)}
    except (LmError, WordGraphError, DecodeError, ModelError) as error:
        raise StageError(f"{piece['field']}: {error}") from error


GRAPH = Stage(
    "graph",
    2,
    _inputs,
    _work,
    reads="HMMs, lexicon, language model",
    writes="`graph.fst` (HCLG), `graph-words.txt`",
    only="with decoder `graph` or `recognizer: gmm`",
)
