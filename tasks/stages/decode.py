"""Stage decode: hypotheses of the test sets, as NIST trn and as Parquet."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired

import pyarrow as pa
from pydantic import TypeAdapter

from configurable.addresses import address_content
from devices.choice import best_device
from recognition.bundle import bundle_digest, load_spec
from recognition.inference import Decoded, decode_set
from speech.decoding import DecodeChoice, DecodeConfig
from speech.features.cmvn import CmvnStats
from speech.scoring import format_trn
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError
from storage.stages import StageOutput
from tasks.config.decoding import grid_of
from tasks.config.home import home
from tasks.dataset.sets import VALID
from tasks.dataset.tables import write_table
from tasks.stages import progress
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageResult
from tasks.stages.bundles import adaptation_inputs, adaptation_source, fetch_bundle, own_bundle
from tasks.stages.decode_adapted import decode_by_speaker
from tasks.stages.decoder_files import rescoring_files, stage_files, with_digests, with_stage_files
from tasks.stages.features import FEATURES
from tasks.stages.process_cache import cached_once
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.run_sets import scored_sets, set_digest, set_url
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out
from tasks.stages.train import TRAIN
from tasks.stages.tuning import check_tuning, figures, tune_on_validation, tuned_text

_WORK = "work"
_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "ref", "hyp", "speaker", "domain", "corpus")],
        *[(name, pa.float64()) for name in ("score", "confidence", "duration")],
    ]
)


def decode_with(
    run: Run,
    bundle: Path,
    name: str,
    decode: DecodeConfig,
    own: bool = True,
    on_damage: Callable[[ShardError], object] | None = None,
) -> list[Decoded]:
    """Hypotheses of one set by a model.

    Args:
        run: The run that has the set.
        bundle: The model.
        name: The set.
        decode: Decoding parameters.
        own: Whether it is this run's model; others read audio, since they may need other features than the stored ones.
        on_damage: Called with the error of each damaged shard, whose utterances are skipped; without it, the first
            damaged shard raises.
    """
    same_features = own or load_spec(bundle).features == run.config.features.model_copy(update={"stored": False})
    speakers = FEATURES.record(run)["speakers"] if same_features else {}
    return decode_set(
        bundle,
        set_url(run, name, recognition=True) if own else run.result("shard").store.child(name).url,
        decode=decode,
        cache=run.cache_folder,
        device=str(best_device(run.config.train.device)),
        speakers={who: CmvnStats.from_dict(value) for who, value in speakers.items()},
        on_progress=lambda done, total: progress.report("decode", done, total, name),
        on_damage=on_damage,
        processes=run.runner.count,
    )


class DecodeRecord(DamageRecord):
    """What was decoded, how fast, and with which values."""

    sets: list[str]
    """The decoded sets."""
    speed: NotRequired[dict[str, dict[str, float]]]
    """Seconds of decoding and of audio by set, except of a resumed stage."""
    tuning: NotRequired[dict[str, Any]]
    """What `tune_on_validation` found, with a section `tune`."""


def publish_hypotheses(output: StageOutput, name: str, found: list[Decoded], counts: dict[str, int]) -> None:
    """Write the hypotheses of a set, and count them."""
    write_table(output.store, f"{name}.parquet", [asdict(entry) for entry in found], _SCHEMA)
    output.store.write(f"{name}.hyp.trn", format_trn({entry.id: entry.hyp for entry in found}).encode())
    output.store.write(f"{name}.ref.trn", format_trn({entry.id: entry.ref for entry in found}).encode())
    counts["utterances"] += len(found)
    counts["empty"] += sum(not entry.hyp for entry in found)


def _inputs(run: Run) -> Inputs:
    if run.config.recognizer == "gmm":
        from tasks.stages.decode_gmm import gmm_inputs

        return gmm_inputs(run)
    sets = scored_sets(run)
    digests = {name: set_digest(run, name, recognition=True) for name in sets}
    config: dict[str, Any] = {"decode": address_content(with_digests(run.config.decode))}
    digests["model"] = _model_digest(run)
    adaptation = adaptation_inputs(run)
    config, digests = config | adaptation[0], digests | adaptation[1]
    if source := stage_files(run):
        digests["graph" if run.config.decode.makes_graph else "language model"] = source["digest"]
    if run.config.rescoring is not None:
        digests["rescoring"] = rescoring_files(run)["digest"]
    if run.config.tune is not None:
        check_tuning(run)
        config["tune"] = address_content(run.config.tune)
        config["grid"] = grid_of(run.config.decode, run.config.tune)
        digests["tuned on"] = set_digest(run, VALID, recognition=True)
    return config, digests


def _model_digest(run: Run) -> str:
    """Digest of the model that the run trained, or that it evaluates."""
    if run.bundle is not None:
        return bundle_digest(run.bundle)
    return TRAIN.record(run)["digest"]


def _work(run: Run, output: StageOutput) -> DecodeRecord:
    if run.config.recognizer == "gmm":
        from tasks.stages.decode_gmm import decode_with_gmm

        return decode_with_gmm(run, output)
    counts: dict[str, int] = {"utterances": 0, "empty": 0}
    damaged: list[QuarantinedShard] = []
    speed: dict[str, dict[str, float]] = {}
    resumed = bool(output.store.list(_WORK))  # then only a part is decoded here, and its time says nothing
    record: DecodeRecord = {"counts": counts, "sets": scored_sets(run), "speed": speed}
    with tempfile.TemporaryDirectory() as folder:
        bundle = run.bundle or own_bundle(run, Path(folder))
        chosen: dict[str, Any] = {}
        if run.config.tune is not None:
            record["tuning"] = tune_on_validation(run, bundle)
            chosen = record["tuning"]["chosen"]
        decode = run.config.decode.model_copy(update=chosen)
        for name in scored_sets(run):
            quarantine = set_quarantine(run, name, output.store)
            started = time.monotonic()
            found = _decode(run, output, bundle, name, decode, quarantine)
            if not resumed:
                speed[name] = {"seconds": time.monotonic() - started, "audio": sum(entry.duration for entry in found)}
            damaged += quarantine.entries()
            publish_hypotheses(output, name, found, counts)
    output.store.delete_tree(_WORK)
    add_damaged(record, damaged)
    return record


def _decode(
    run: Run, output: StageOutput, bundle: Path, name: str, decode: DecodeConfig, quarantine: ShardQuarantine
) -> list[Decoded]:
    """Decode a set: in this process if the runner is local or the model is not the run's own, else in workers.

    Args:
        run: The run.
        output: The stage's output.
        bundle: The model.
        name: The set.
        decode: Decoding parameters, without the files that stages make.
        quarantine: Takes damaged shards.
    """
    source = stage_files(run)
    adaptation = adaptation_source(run)
    if (run.runner.local and not adaptation) or run.bundle is not None:
        whole = with_stage_files(decode, source)
        return decode_with(run, bundle, name, whole, own=run.bundle is None, on_damage=quarantine.add)
    url = set_url(run, name, recognition=True)
    index = ShardIndex.read(ObjectStore(url))
    common = {
        "model": run.result("train").url,
        "digest": TRAIN.record(run)["digest"],
        "url": url,
        "decode": decode.model_dump(mode="json"),
        "files": source,  # fetched by each worker, which may be on another machine
        "device": run.config.train.device,
        "speakers": FEATURES.record(run)["speakers"],
    }
    if adaptation:
        common["adaptation"] = adaptation
        return decode_by_speaker(run, output.store.child(_WORK), name, url, common, quarantine)
    pieces = (common | {"name": piece_name(n), "shards": n} for n in share_out(len(index.shards), run.runner))
    records = {record.name: record for record in index.shards}
    found: list[Decoded] = []
    done = 0
    for answer in map_pieces(run.runner, "tasks.stages.decode:decode_piece", pieces, f"decode {name}"):
        found += [Decoded(**row) for row in answer["rows"]]
        for shard, reason in answer["damaged"]:
            quarantine.add(ShardError(reason, records[shard], reason))
        done += answer["shards"]
        progress.report("decode", done, len(index.shards), name)
    return found


@cached_once(maxsize=2)
def _fetched(url: str, digest: str) -> "tempfile.TemporaryDirectory[str]":
    """A model's local copy; cached for further pieces in this process, and removed when nobody refers to it."""
    folder = tempfile.TemporaryDirectory(prefix="starling-model-")
    fetch_bundle(StageOutput.at(url), Path(folder.name))
    return folder


def decode_piece(piece: Piece) -> dict[str, Any]:
    """Decode some shards of a set; returns `rows`, `damaged` shards with reasons, and the number of `shards`."""
    damaged: list[tuple[str, str]] = []
    decode: DecodeConfig = TypeAdapter(DecodeChoice).validate_python(piece["decode"])
    model = _fetched(piece["model"], piece["digest"])  # its folder is there as long as this refers to it
    found = decode_set(
        Path(model.name),
        piece["url"],
        decode=with_stage_files(decode, piece["files"]),
        cache=home() / "cache",
        device=str(best_device(piece["device"])),
        speakers={who: CmvnStats.from_dict(value) for who, value in piece["speakers"].items()},
        on_damage=lambda error: damaged.append(error.damage),
        shards=piece["shards"],
    )
    return {"rows": [asdict(entry) for entry in found], "damaged": damaged, "shards": len(piece["shards"])}


def set_quarantine(run: Run, name: str, store: ObjectStore) -> ShardQuarantine:
    """An empty quarantine for the shards of a set, in a stage's output."""
    total = len(ShardIndex.read(ObjectStore(set_url(run, name, recognition=True))))
    quarantine = ShardQuarantine(store, total, run.config.data.max_quarantined, f"damaged-shards-{name}")
    quarantine.clear()
    return quarantine


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    if tuning := result.record.get("tuning"):
        yield Artifact(tuning["table"], f"{result.markdown}\n\n{tuned_text(tuning)}")
    else:
        yield Artifact(result.markdown)


DECODE = Stage(
    "decode",
    5,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    artifacts=_artifacts,
    figures=figures,
    evaluates=True,
    reads="test sets, model, language model or graph",
    writes="per set: `.hyp.trn`, `.ref.trn`, Parquet with scores",
)
