"""Decoding of test sets with the GMM-HMM of the stage align: two passes with fMLLR for each speaker.

Speakers are decoded in parallel through the pipeline's runner; after a kill, those that are done are not repeated.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from configurable.addresses import address_content
from recognition.inference import Decoded
from speech.features import FeatureChoice, build_features
from speech.hmm.aligner import phone_families
from speech.hmm.config import GraphSearchConfig
from speech.hmm.decode import PRIOR_FRAMES, GraphSearch, decode_speaker, first_pass, last_pass
from speech.hmm.graph_files import read_graph
from speech.hmm.model import HmmModel
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.stages import StageOutput
from tasks.stages.align import AlignmentModel, config_of
from tasks.stages.base import Inputs, Run
from tasks.stages.by_speaker import Answer, Decoding, answered, joined, speaker_pieces
from tasks.stages.decode import DecodeRecord, publish_hypotheses
from tasks.stages.decoder_files import graph_files, local_files
from tasks.stages.feature_shards import FeatureSet, compute_features, opened
from tasks.stages.process_cache import cached_once
from tasks.stages.quarantined import add_damaged
from tasks.stages.run_sets import scored_sets
from tasks.stages.runner import Piece, map_pieces
from tasks.stages.shard import SHARD

_WORK = "work"


def search_of(run: Run) -> GraphSearchConfig:
    """How the GMM-HMM decodes."""
    return config_of(run).recognize


def gmm_inputs(run: Run) -> Inputs:
    """Configuration and inputs of the stage decode."""
    config = {"gmm": address_content(search_of(run), without=("arpa",)), "prior": PRIOR_FRAMES}
    sets = SHARD.record(run)["sets"]
    digests = {name: sets[name]["digest"] for name in scored_sets(run)}
    return config, digests | {"model": run.result("align").key, "graph": run.result("graph").key}


def decode_with_gmm(run: Run, output: StageOutput) -> DecodeRecord:
    """Decode the test sets; returns the record of the stage decode."""
    counts: dict[str, int] = {"utterances": 0, "empty": 0}
    damaged: list[QuarantinedShard] = []
    work = output.store.child(_WORK)
    for name in scored_sets(run):
        features, bad = compute_features(run, config_of(run).features, name, work.child(f"features-{name}"), "decode")
        damaged += bad
        publish_hypotheses(output, name, _decoded(run, work, features, name), counts)
    work.delete_tree("")
    record: DecodeRecord = {"counts": counts, "sets": scored_sets(run)}
    add_damaged(record, damaged)
    return record


def _decoded(run: Run, work: ObjectStore, features: FeatureSet, name: str) -> list[Decoded]:
    """Hypotheses of a set, in the order of its index."""
    common = {
        "work": work.url,
        "graph": graph_files(run),
        "align": run.result("align").url,
        "features": features.store.url,
        "digest": features.index.digest,
        "kind": config_of(run).features.model_dump(mode="json"),
        "sample_rate": run.config.data.sample_rate,
        "search": search_of(run).model_dump(mode="json"),
    }
    pieces = speaker_pieces(features.index, name, common)
    answers = map_pieces(run.runner, "tasks.stages.decode_gmm:decode_speaker_piece", pieces, f"decode {name}")
    return joined(answers, features.index, name)


@cached_once(maxsize=2)
def _loaded(align: str, graph: str, search: str) -> tuple[HmmModel, GraphSearch, GraphSearch]:
    """Model, and the decoders of the first passes and of the last one; cached for further pieces in this process."""
    options = GraphSearchConfig.model_validate_json(search)
    with tempfile.TemporaryDirectory() as folder:
        model = AlignmentModel.fetch(StageOutput.at(align), Path(folder)).model
    files = local_files(**json.loads(graph))
    found = read_graph(Path(files["graph"]), Path(files["words"]))
    last = GraphSearch(found.arrays, found.words, last_pass(options), phone_families(model)[1])
    return model, last.with_options(first_pass(options)), last


def decode_speaker_piece(piece: Piece) -> Answer:
    """Decode one speaker's utterances."""

    def work(rows: Sequence[int]) -> Decoding:
        model, first, last = _loaded(
            piece["align"], *(json.dumps(piece[name], sort_keys=True) for name in ("graph", "search"))
        )
        source = opened(piece["features"], piece["digest"])
        extract = build_features(TypeAdapter(FeatureChoice).validate_python(piece["kind"]), piece["sample_rate"])
        stored = [source.unnormalized(row) for row in rows]
        features = [source.normalized(feats, piece["name"]) for feats in stored]
        speech = [extract.speech_mask(feats) for feats in stored]
        passes = int(piece["search"]["passes"]) if model.unadapted is not None else 0
        found = decode_speaker(model, last, features, passes, speech=speech, first=first)[-1]
        results = ((" ".join(one.words), -one.cost if one.words else 0.0, one.confidence) for one in found)
        return dict(zip(rows, results, strict=True)), []

    return answered(piece, work)
