"""Optional stage restore: transcripts in the written form of the model that training begins with.

That model recognizes the training and validation sets, and `speech.restoring` joins its texts with the transcripts.
Pieces of shards go through the pipeline's runner; after a kill, those that are done are not repeated.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configurable.addresses import address_content
from devices.choice import best_device
from recognition.bundle import BundleSpec
from recognition.data.written_texts import SCHEMA
from recognition.inference import encode_set, open_set
from recognition.recognizer import Recognizer
from speech.decoding import AttentionDecodeConfig
from speech.restoring import restored
from speech.text import normalizer_of
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError
from storage.stages import StageOutput
from tasks.config.home import home
from tasks.config.restore import RestoreConfig
from tasks.dataset.tables import TableWriter
from tasks.stages import progress
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.bundles import fetch_bundle
from tasks.stages.initial import initial_model, model_config, system_config, transfer_initial
from tasks.stages.process_cache import cached_once
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.run_sets import set_digest, set_url
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out
from tasks.stages.shard import SHARD
from tasks.stages.train import NOT_OF_THE_MODEL, check_languages, make_spec

_WORK, _MODEL = "work", "model"
_SETS = ("train", "valid")
_DECODE = AttentionDecodeConfig(beam=1, ctc_weight=0.0, times="none")
"""Greedy: what the model writes without training needs no better search, and an utterance that it gets wrong has only
its form from it."""


def config_of(run: Run) -> RestoreConfig:
    """The stage's configuration; the stage runs only if there is one."""
    assert run.config.restore is not None
    return run.config.restore


def _inputs(run: Run) -> Inputs:
    initial = initial_model(run)
    if initial is None:
        raise StageError(
            "restore needs a model that writes as people do, and training begins with random weights: name one in "
            "train.init or model.source, or remove restore"
        )
    features, normalizer = run.config.features, run.config.data.normalizer
    parts = {"features": features, "normalizer": normalizer, "system": system_config(run), "": config_of(run)}
    content = {name: address_content(part) for name, part in parts.items()}
    content["model"] = address_content(model_config(run), without=NOT_OF_THE_MODEL)
    return content, {name: set_digest(run, name) for name in _SETS} | {"model": initial.source.digest}


class RestoreRecord(DamageRecord):
    """What was restored."""

    sets: dict[str, dict[str, int]]
    """Of each set: utterances that have got another form, and those that have not."""


def _work(run: Run, output: StageOutput) -> RestoreRecord:
    spec = make_spec(run)
    check_languages(run, spec)
    transfer = transfer_initial(run, spec)
    assert transfer is not None, "checked by the inputs"
    if new := transfer.incomplete:
        raise StageError(
            f"restore needs a model that can already write, but {len(new)} of its tensors would begin with random "
            f"values, such as {new[0]}: begin with a whole Whisper, or remove restore"
        )
    work = output.store.child(_WORK)
    with TemporaryDirectory(prefix="starling-restore-") as folder:
        spec.save(Path(folder), transfer.weights)
        for name in BundleSpec.members:
            work.write_file(f"{_MODEL}/{name}", Path(folder) / name)
    sets: dict[str, dict[str, int]] = {}
    damaged: list[QuarantinedShard] = []
    for name in _SETS:
        total, limit = SHARD.record(run)["sets"][name]["utterances"], run.config.data.max_quarantined
        quarantine = ShardQuarantine(output.store, total, limit, f"damaged-shards-{name}")
        quarantine.clear()
        sets[name] = _restore_set(run, output, name, quarantine)
        damaged += quarantine.entries()
    counts = {kind: sum(of_set[kind] for of_set in sets.values()) for kind in ("restored", "as they were")}
    record: RestoreRecord = {"counts": counts, "sets": sets}
    work.delete_tree("")
    add_damaged(record, damaged)
    return record


def _restore_set(run: Run, output: StageOutput, name: str, quarantine: ShardQuarantine) -> dict[str, int]:
    """Write the texts of a set, in the order of its index; returns how many have got another form."""
    url, work = set_url(run, name), output.store.child(_WORK)
    index = ShardIndex.read(ObjectStore(url))
    common = {
        "model": work.url,
        "url": url,
        "work": work.child(name).url,
        "most_errors": config_of(run).most_errors,
        "device": run.config.train.device,
    }
    pieces = (common | {"name": piece_name(n), "numbers": n} for n in share_out(len(index.shards), run.runner))
    records = {record.name: record for record in index.shards}
    texts: dict[int, str] = {}
    for answer in map_pieces(run.runner, "tasks.stages.restore:restore_piece", pieces, f"restore {name}"):
        texts |= {int(row): text for row, text in answer["texts"].items()}
        for shard, reason in answer["damaged"]:
            quarantine.add(ShardError(reason, records[shard], reason))
        progress.report("restore", len(texts), len(index), name)
    ids, transcripts = index.values("id"), index.values("text")
    changed = 0
    with TemporaryDirectory() as folder:
        writer = TableWriter(Path(folder) / f"{name}.parquet", SCHEMA)
        for row in range(len(index)):
            writer.add({"id": ids[row].as_py(), "text": texts.get(row)})
            changed += row in texts and texts[row] != transcripts[row].as_py()
        writer.close()
        output.store.write_file(f"{name}.parquet", writer.path)
    return {"restored": changed, "as they were": len(texts) - changed}


def restore_piece(piece: Piece) -> dict[str, Any]:
    """Restore the texts of some shards: text by row, and damaged shards with the reason of each."""
    work, name = ObjectStore(piece["work"]), f"{piece['name']}.json"
    if work.exists(name):  # done before a kill
        kept: dict[str, Any] = work.read_json(name)
        return kept
    recognizer = _opened(piece["model"], piece["device"])
    damaged: list[tuple[str, str]] = []
    texts = dict(_texts(recognizer, piece, lambda error: damaged.append(error.damage)))
    answer = {"texts": {str(row): text for row, text in texts.items()}, "damaged": damaged}
    if not damaged:  # damaged shards may be repaired
        work.write_json(name, answer)
    return answer


def _texts(
    recognizer: Recognizer[Any], piece: Piece, on_damage: Callable[[ShardError], object]
) -> Iterator[tuple[int, str]]:
    """The restored text of each utterance of a piece, by row of the index."""
    dataset = open_set(piece["url"], recognizer.spec.sample_rate, home() / "cache")
    rows = np.flatnonzero(np.isin(np.asarray(dataset.index.column("shard")), piece["numbers"]))
    rows = rows[dataset.durations[rows] <= recognizer.spec.max_seconds]  # training leaves out the longer ones
    languages = dataset.index.values("language")
    normalizer = normalizer_of(recognizer.spec.normalizer)
    for part, encoded in encode_set(recognizer, dataset, rows, on_damage=on_damage):
        hypotheses = recognizer.search(encoded)
        for row, text, hypothesis in zip(map(int, part.rows), part.texts, hypotheses, strict=True):
            language = languages[row].as_py() or ""
            yield row, restored(text, hypothesis.text, normalizer, language, piece["most_errors"])


@cached_once(maxsize=1)
def _opened(model: str, device: str) -> Recognizer[Any]:
    """The recognizer of the model in a store; cached for further pieces in this process."""
    with TemporaryDirectory() as folder:
        bundle = fetch_bundle(ObjectStore(model), Path(folder))
        return Recognizer.load(bundle, _DECODE, str(best_device(device)))


RESTORE = Stage(
    "restore",
    1,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    reads="training and validation shards, the model that training begins with",
    writes="`<set>.parquet`: transcripts as that model would write them",
    only="with a section `restore`",
)
