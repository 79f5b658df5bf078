"""Stage 5, decode: hypotheses of the test sets, as NIST trn and as Parquet."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter

from speech.bundle import load_spec
from speech.decoding import DecodeChoice, DecodeConfig
from speech.features.cmvn import CmvnStats
from speech.scoring import format_trn
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError
from storage.stages import StageOutput
from tasks.config.home import home
from tasks.stages import progress
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.decoder_files import with_digests
from tasks.stages.features import found_whole, quarantine_record, set_digest, set_url
from tasks.stages.folds import is_tested
from tasks.stages.prepare import write_table
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out
from training.learner.devices import best_device
from training.learner.inference import Decoded, decode_set

_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "ref", "hyp", "speaker", "domain", "corpus")],
        *[(name, pa.float64()) for name in ("score", "confidence", "duration")],
    ]
)


def scored_sets(run: Run) -> list[str]:
    """Sets to decode: those of `score.sets`, else every test set, else the validation set.

    Raises:
        StageError: If a set of `score.sets` does not exist.
    """
    present = sorted(run.result("shard").record["sets"])
    for name in run.config.score.sets:
        if name not in present:
            raise StageError(f"score.sets names {name!r}, but the data has only {', '.join(present)}")
    tests = [name for name in present if is_tested(name, run.config.data)]
    return list(run.config.score.sets) or tests or ["valid"]


def fetch_bundle(source: ObjectStore | StageOutput, folder: Path) -> Path:
    """Copy a trained model's bundle into a local folder.

    Args:
        source: Store of the bundle, or output of a training, whose files are checked against its record.
        folder: The local folder.

    Raises:
        DamagedObjectError: If a file differs from the record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "bundle.json"):
        (folder / name).write_bytes(source.read(f"model/{name}"))
    return folder


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
    speakers = run.result("features").record["speakers"] if same_features else {}
    return decode_set(
        bundle,
        set_url(run, name) if own else run.result("shard").store.child(name).url,
        decode=decode,
        cache=run.cache_folder,
        device=str(best_device(run.config.train.device)),
        speakers={who: CmvnStats.from_dict(value) for who, value in speakers.items()},
        on_progress=lambda done, total: progress.report("decode", done, total, name),
        on_damage=on_damage,
        processes=run.runner.count,
    )


def _inputs(run: Run) -> Inputs:
    sets = scored_sets(run)
    digests = {name: set_digest(run, name) for name in sets}
    # only what differs from the default, as in `tasks.stages.train`
    config = with_digests(run.config.decode).model_dump(mode="json", exclude_defaults=True)
    return {"decode": config}, digests | {"model": run.result("train").record["digest"]}


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    counts: dict[str, int] = {"utterances": 0, "empty": 0}
    damaged: list[QuarantinedShard] = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = fetch_bundle(run.result("train").output, Path(folder))
        decode = run.config.decode.prepared(Path(folder))
        for name in scored_sets(run):
            quarantine = set_quarantine(run, name, output.store)
            found = _decode(run, bundle, name, decode, quarantine)
            damaged += quarantine.entries()
            write_table(output.store, f"{name}.parquet", [asdict(entry) for entry in found], _SCHEMA)
            hypotheses = {entry.id: entry.hyp for entry in found}
            references = {entry.id: entry.ref for entry in found}
            output.store.write(f"{name}.hyp.trn", format_trn(hypotheses).encode())
            output.store.write(f"{name}.ref.trn", format_trn(references).encode())
            counts["utterances"] += len(found)
            counts["empty"] += sum(not entry.hyp for entry in found)
    return {"counts": counts, "sets": scored_sets(run)} | quarantine_record(counts, damaged)


def _decode(run: Run, bundle: Path, name: str, decode: DecodeConfig, quarantine: ShardQuarantine) -> list[Decoded]:
    """Decode a set with this run's model: in this process if the runner is local, else in workers."""
    if run.runner.local:
        return decode_with(run, bundle, name, decode, on_damage=quarantine.add)
    index = ShardIndex.read(ObjectStore(set_url(run, name)))
    common = {
        "model": run.result("train").url,
        "digest": run.result("train").record["digest"],
        "url": set_url(run, name),
        "decode": decode.model_dump(mode="json"),
        "device": run.config.train.device,
        "speakers": run.result("features").record["speakers"],
    }
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


@lru_cache(maxsize=2)
def _fetched(url: str, digest: str) -> "tempfile.TemporaryDirectory[str]":
    """A model's local copy; cached for further pieces in this process."""
    folder = tempfile.TemporaryDirectory(prefix="starling-model-")
    fetch_bundle(StageOutput.at(url), Path(folder.name))
    return folder


def decode_piece(piece: Piece) -> dict[str, Any]:
    """Decode some shards of a set; returns `rows`, `damaged` shards with reasons, and the number of `shards`."""
    damaged: list[tuple[str, str]] = []

    def note(error: ShardError) -> None:
        assert error.shard is not None
        damaged.append((error.shard.name, error.reason))

    found = decode_set(
        Path(_fetched(piece["model"], piece["digest"]).name),
        piece["url"],
        decode=TypeAdapter(DecodeChoice).validate_python(piece["decode"]),
        cache=home() / "cache",
        device=str(best_device(piece["device"])),
        speakers={who: CmvnStats.from_dict(value) for who, value in piece["speakers"].items()},
        on_damage=note,
        shards=piece["shards"],
    )
    return {"rows": [asdict(entry) for entry in found], "damaged": damaged, "shards": len(piece["shards"])}


def set_quarantine(run: Run, name: str, store: ObjectStore) -> ShardQuarantine:
    """An empty quarantine for the shards of a set, in a stage's output."""
    total = len(ShardIndex.read(ObjectStore(set_url(run, name))))
    quarantine = ShardQuarantine(store, total, run.config.data.max_quarantined, f"damaged-shards-{name}")
    quarantine.clear()
    return quarantine


DECODE = Stage("decode", 3, _inputs, _work, found_whole)
