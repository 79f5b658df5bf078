"""Optional stage realign: aligns the training and validation sets with a network that was trained before.

The output's `alignments/<set>.parquet` take the place of those of the stage `align` in training. Pieces of shards are
aligned through the pipeline's runner; after a kill, those that are done are not repeated.
"""

import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from configurable.addresses import address_content
from devices.choice import best_device
from recognition.alignment import StateAligner, align_set
from recognition.bundle import SPEC, BundleSpec, copy_network, load_spec
from recognition.data.state_targets import read_alignments
from recognition.inference import open_set
from speech.alignments import Alignment, AlignmentInfo, AlignmentTable, write_alignments
from speech.features.cmvn import CmvnStats
from speech.hmm.aligner import Aligner
from speech.hmm.viterbi import AlignOptions
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError
from storage.stages import StageOutput
from tasks.config.home import home
from tasks.config.realign import RealignConfig
from tasks.stages import progress
from tasks.stages.align import AlignmentModel, aligned_sets
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.features import FEATURES
from tasks.stages.process_cache import cached_once
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.run_sets import set_digest, set_url
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out
from tasks.stages.shard import SHARD
from tasks.tracking.fetching import download_bundle
from tasks.tracking.stage_runs import log_stage

_WORK, _NETWORK = "work", "network"
_SPEAKERS = "speakers.json"


def config_of(run: Run) -> RealignConfig:
    """The stage's configuration; the stage runs only if there is one."""
    assert run.config.realign is not None
    return run.config.realign


@lru_cache(maxsize=2)
def _fetched(model: str) -> Path:
    """Local folder of the network's bundle; an alias is looked up once in a process."""
    if model.startswith("models:/"):
        try:
            return download_bundle(model)
        except ValueError as error:
            raise StageError(f"realign.model: {error}") from error
    if not (Path(model) / SPEC).is_file():
        raise StageError(f"realign.model: {model} is no bundle's folder: give one, or models:/NAME@ALIAS")
    return Path(model)


def _inputs(run: Run) -> Inputs:
    cfg = config_of(run)
    digests = {name: set_digest(run, name) for name in aligned_sets(run)}
    with tempfile.TemporaryDirectory() as folder:
        digests |= {"align": run.result("align").key, "model": copy_network(_fetched(cfg.model), Path(folder))}
    return address_content(cfg, without=("model",)), digests


class RealignRecord(DamageRecord):
    """Figures of a network's alignments."""

    sets: dict[str, dict[str, Any]]
    """Aligned and failed utterances, the share of moved frames, and the digest of each set's table."""
    tracking: dict[str, Any]
    """The MLflow run."""


def _work(run: Run, output: StageOutput) -> RealignRecord:
    bundle, work = _fetched(config_of(run).model), output.store.child(_WORK)
    before = {name: read_alignments(run.result("align").store.child("alignments"), name) for name in aligned_sets(run)}
    info = before["train"].info
    states = load_spec(bundle).states
    if states is None or states.model != info.model:
        raise StageError(
            "realign.model does not have the states of this section align: name a recognizer that was trained on its "
            "alignments, or remove realign"
        )
    with tempfile.TemporaryDirectory() as folder:
        copy_network(bundle, Path(folder))
        for name in BundleSpec.members:
            work.write_file(f"{_NETWORK}/{name}", Path(folder) / name)
    work.write_json(f"{_NETWORK}/{_SPEAKERS}", FEATURES.record(run)["speakers"])
    counts = {"aligned": 0, "failed": 0}
    sets: dict[str, Any] = {}
    damaged: list[QuarantinedShard] = []
    for name in aligned_sets(run):
        total, limit = SHARD.record(run)["sets"][name]["utterances"], run.config.data.max_quarantined
        quarantine = ShardQuarantine(output.store, total, limit, f"damaged-shards-{name}")
        failures = _align_set(run, output, name, info, quarantine)
        table = read_alignments(output.store.child("alignments"), name)
        sets[name] = {"aligned": len(table), "failed": len(failures), "digest": table.digest}
        sets[name] |= {"moved": moved_share(before[name], table), "failures": dict(list(failures.items())[:100])}
        counts["aligned"] += len(table)
        counts["failed"] += len(failures)
        damaged += quarantine.entries()
    figures = {f"realign.{name}": float(value) for name, value in counts.items()}
    figures |= {f"realign.moved.{name}": of_set["moved"] for name, of_set in sets.items()}
    tracking = log_stage(run, "align", run.result("align").key, figures)
    record: RealignRecord = {"counts": counts, "sets": sets, "tracking": tracking}
    work.delete_tree("")
    add_damaged(record, damaged)
    return record


def moved_share(before: AlignmentTable, after: AlignmentTable) -> float:
    """Share of the frames that have another tied state than before; of utterances in both tables."""
    moved = frames = 0
    for name in after:
        if name in before:
            old, new = before.pdfs(name), after.pdfs(name)
            length = min(len(old), len(new))
            moved += int((old[:length] != new[:length]).sum())
            frames += length
    return moved / max(1, frames)


def _align_set(
    run: Run, output: StageOutput, name: str, info: AlignmentInfo, quarantine: ShardQuarantine
) -> dict[str, str]:
    """Write the alignments of a set; returns the reasons why utterances have none."""
    cfg, url, work = config_of(run), set_url(run, name), output.store.child(_WORK)
    index = ShardIndex.read(ObjectStore(url))
    common = {
        "network": work.child(_NETWORK).url,
        "align": run.result("align").url,
        "url": url,
        "work": work.child(name).url,
        "info": [info.frame_shift_ms, info.num_pdfs, info.model],
        "options": [cfg.beam, cfg.retry_beam, cfg.acoustic_scale],
        "device": run.config.train.device,
    }
    pieces = (common | {"name": piece_name(n), "numbers": n} for n in share_out(len(index.shards), run.runner))
    records = {record.name: record for record in index.shards}
    failures: dict[str, str] = {}
    done = 0
    for answer in map_pieces(run.runner, "tasks.stages.realign:realign_piece", pieces, f"realign {name}"):
        failures |= answer["failures"]
        for shard, reason in answer["damaged"]:
            quarantine.add(ShardError(reason, records[shard], reason))
        done += answer["shards"]
        progress.report("realign", done, len(index.shards), name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.parquet"
        write_alignments(path, info, _stored(work.child(name)))
        output.store.write_file(f"alignments/{name}.parquet", path)
    return failures


def _stored(work: ObjectStore) -> Iterator[Alignment]:
    """The alignments of all pieces."""
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(name for name in work.list() if name.endswith(".parquet")):
            table = AlignmentTable.read(work.fetch(name, Path(folder)))
            yield from map(table.alignment, table)


def realign_piece(piece: Piece) -> dict[str, Any]:
    """Align some shards of a set; returns the number of shards, failures with reasons, and damaged shards."""
    work, answer = ObjectStore(piece["work"]), f"{piece['name']}.json"
    if work.exists(answer):  # done before a kill
        kept: dict[str, Any] = work.read_json(answer)
        return kept
    network, model = _opened(piece["network"], piece["align"], piece["device"])
    dataset = open_set(piece["url"], network.spec.sample_rate, home() / "cache")
    rows = np.flatnonzero(np.isin(np.asarray(dataset.index.column("shard")), piece["numbers"])).tolist()
    words = {word for row in rows for word in dataset.index.row(row)["text"].split()}
    hmm = Aligner(model.model, model.pronunciations(words), model.spoken, AlignOptions(*piece["options"]))
    failures: dict[str, str] = {}
    alignments: list[Alignment] = []
    damaged: list[tuple[str, str]] = []
    aligned = align_set(replace(network, hmm=hmm), dataset, rows, on_damage=lambda error: damaged.append(error.damage))
    for _, utterance in aligned:
        if utterance.alignment is None:
            failures[utterance.id] = utterance.failure
        else:
            alignments.append(utterance.alignment)
    target = io.BytesIO()
    write_alignments(target, AlignmentInfo(*piece["info"]), alignments)
    work.write(f"{piece['name']}.parquet", target.getvalue())
    result = {"shards": len(piece["numbers"]), "failures": failures, "damaged": damaged}
    if not damaged:  # damaged shards may be repaired
        work.write_json(answer, result)
    return result


@cached_once(maxsize=1)
def _opened(network: str, align: str, device: str) -> tuple[StateAligner, AlignmentModel]:
    """The network, without a lexicon yet, and the GMM-HMM; cached for further pieces in this process.

    Args:
        network: URL of the bundle, with the speakers' statistics beside it.
        align: URL of the output of the stage align.
        device: Where the network computes.
    """
    store = ObjectStore(network)
    speakers = {who: CmvnStats.from_dict(value) for who, value in store.read_json(_SPEAKERS).items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for member in BundleSpec.members:
            (folder / member).write_bytes(store.read(member))
        model = AlignmentModel.fetch(StageOutput.at(align), folder / "align")
        hmm = Aligner(model.model, {}, model.spoken)
        return StateAligner.load(folder, hmm, best_device(device), speakers), model


REALIGN = Stage(
    "realign",
    1,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    reads="the output of align, training and validation shards, a trained network",
    writes="`alignments/`",
    only="with a section `realign`",
)
