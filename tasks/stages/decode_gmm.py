"""Decoding of test sets with the GMM-HMM of the stage align: two passes with fMLLR for each speaker.

Speakers are decoded in parallel through the pipeline's runner; after a kill, those that are done are not repeated.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from speech.hmm.confidence import phone_families
from speech.hmm.config import GraphSearchConfig
from speech.hmm.decode import DecodeOptions, GraphSearch, by_speaker, decode_plain, decode_speaker
from speech.hmm.graph_files import read_graph
from speech.hmm.model import HmmModel
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.stages import StageOutput
from tasks.stages import progress
from tasks.stages.align import config_of
from tasks.stages.align_data import FeatureSet, compute_features, opened
from tasks.stages.align_model import AlignmentModel
from tasks.stages.base import Inputs, Run
from tasks.stages.decode import publish_hypotheses, scored_sets
from tasks.stages.decoder_files import graph_files, local_files
from tasks.stages.features import quarantine_record
from tasks.stages.runner import Piece, map_pieces
from training.learner.inference import Decoded

_WORK = "work"


def search_of(run: Run) -> GraphSearchConfig:
    """How the GMM-HMM decodes."""
    return config_of(run).recognize


def gmm_inputs(run: Run) -> Inputs:
    """Configuration and inputs of the stage decode."""
    search = search_of(run)
    config = {"gmm": search.model_dump(mode="json", exclude_defaults=True, exclude={"arpa"})}
    sets = run.result("shard").record["sets"]
    digests = {name: sets[name]["digest"] for name in scored_sets(run)}
    return config, digests | {"model": run.result("align").key, "graph": run.result("graph").key}


def decode_with_gmm(run: Run, output: StageOutput) -> dict[str, Any]:
    """Decode the test sets; returns the record of the stage decode."""
    counts: dict[str, int] = {"utterances": 0, "empty": 0}
    damaged: list[QuarantinedShard] = []
    work = output.store.child(_WORK)
    for name in scored_sets(run):
        features, bad = compute_features(run, config_of(run).features, name, work.child(f"features-{name}"), "decode")
        damaged += bad
        publish_hypotheses(output, name, list(_decoded(run, work, features, name)), counts)
    work.delete_tree("")
    return {"counts": counts, "sets": scored_sets(run)} | quarantine_record(counts, damaged)


def _pieces(run: Run, work: ObjectStore, features: FeatureSet, name: str) -> Iterator[Piece]:
    """A piece for each speaker."""
    speakers = list(features.index.column("speaker"))
    for number, (speaker, rows) in enumerate(sorted(by_speaker(speakers).items())):
        yield {
            "name": speaker,
            "work": work.url,
            "graph": graph_files(run),
            "align": run.result("align").url,
            "features": features.store.url,
            "digest": features.index.digest,
            "rows": rows,
            "result": f"hypotheses-{name}/{number}.json",
            "search": search_of(run).model_dump(mode="json"),
        }


def _decoded(run: Run, work: ObjectStore, features: FeatureSet, name: str) -> list[Decoded]:
    """Hypotheses of a set, in the order of its index."""
    index = features.index
    found: dict[int, Decoded] = {}
    pieces = _pieces(run, work, features, name)
    for answer in map_pieces(run.runner, "tasks.stages.decode_gmm:decode_speaker_piece", pieces, f"decode {name}"):
        for row, (hypothesis, score, confidence) in answer:
            about = index.row(row)
            found[row] = Decoded(
                id=about["id"],
                ref=about["text"],
                hyp=hypothesis,
                score=score,
                confidence=confidence,
                speaker=about["speaker"],
                domain=about["domain"],
                corpus=about["corpus"],
                duration=float(about["duration"]),
            )
        progress.report("decode", len(found), len(index), name)
    return [found[row] for row in sorted(found)]


@lru_cache(maxsize=2)
def _loaded(align: str, graph: str, search: str) -> tuple[HmmModel, GraphSearch]:
    """Model and decoder; cached for further pieces in this process."""
    options = GraphSearchConfig.model_validate_json(search)
    with tempfile.TemporaryDirectory() as folder:
        model = AlignmentModel.fetch(StageOutput.at(align), Path(folder)).model
    files = local_files(**json.loads(graph))
    found = read_graph(Path(files["graph"]), Path(files["words"]))
    decoding = DecodeOptions(options.beam, options.max_active, options.acoustic_scale)
    return model, GraphSearch(found.arrays.constant(), found.words, decoding, phone_families(model)[1])


def decode_speaker_piece(piece: Piece) -> list[Any]:
    """Decode a speaker; returns the row of each utterance, and its words, score and confidence."""
    store = ObjectStore(piece["work"])
    if store.exists(piece["result"]):  # done before a kill
        kept: list[Any] = store.read_json(piece["result"])
        return kept
    model, decoder = _loaded(piece["align"], *(json.dumps(piece[name], sort_keys=True) for name in ("graph", "search")))
    passes = int(piece["search"]["passes"])
    rows: Sequence[int] = piece["rows"]
    features = [one.features for one in opened(piece["features"], piece["digest"]).utterances(list(rows))]
    adapts = model.unadapted is not None and passes > 0
    found = decode_speaker(model, decoder, features, passes)[-1] if adapts else decode_plain(model, decoder, features)
    answer = [
        [row, [" ".join(one.words), -one.cost if one.words else 0.0, one.confidence]]
        for row, one in zip(rows, found, strict=True)
    ]
    store.write_json(piece["result"], answer)
    return answer
