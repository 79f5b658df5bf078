"""Stage decode: hypotheses of the test sets, as NIST trn and as Parquet.

Workers other than this process's threads decode pieces of a set: some shards, or a speaker, where the system recognizes
all utterances of a speaker together. After an interruption or a kill, pieces that are done are not repeated, nor are
the batches that this process has decoded itself.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from configurable.addresses import address_content
from devices.choice import best_device
from recognition.bundle import bundle_digest, load_spec
from recognition.inference import Decoded, decode_set, open_set
from recognition.recognizer import Recognizer
from speech.decoding import DecodeChoice, DecodeConfig
from speech.features.cmvn import CmvnStats
from speech.hmm.decode import PRIOR_FRAMES
from speech.hmm.utterances import by_speaker as rows_by_speaker
from speech.scoring import format_trn
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError
from storage.stages import StageOutput, digest_json
from tasks.config.home import home
from tasks.config.pipeline import RunnerConfig
from tasks.dataset.sets import VALID
from tasks.dataset.tables import write_table
from tasks.stages import progress
from tasks.stages.align import config_of
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageResult, counts_text
from tasks.stages.bundles import adaptation_inputs, bundle_source, make_bundle, own_bundle
from tasks.stages.decoder_files import rescoring_files, stage_files, with_digests, with_stage_files
from tasks.stages.features import FEATURES
from tasks.stages.process_cache import cached_once
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.run_sets import scored_sets, set_digest, set_url
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN
from tasks.stages.tuning import figures, tune_on_validation, tuned_inputs, tuned_text

_WORK = "work"
_KEEP_S = 5.0
"""Seconds of decoding that are lost at most when the process is killed, besides a batch."""
Row = list[Any]
"""Of an utterance: its row in the index, and hypothesis, score and confidence."""
Answer = dict[str, Any]
"""Of a piece. `rows`: for each utterance its row, and hypothesis, score and confidence; `damaged`: shards that could
not be read, with the reason."""
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
    on_progress: Callable[[int, int], None] | None = None,
    on_damage: Callable[[ShardError], object] | None = None,
    kept: "KeptHypotheses | None" = None,
) -> list[Decoded]:
    """Hypotheses of one set by a model, in this process.

    Args:
        run: The run that has the set.
        bundle: The model.
        name: The set.
        decode: Decoding parameters.
        own: Whether it is this run's model; others read audio, since they may need other features than the stored ones.
        on_progress: Called with the number of finished utterances and of all.
        on_damage: Called with the error of each damaged shard, whose utterances are skipped; without it, the first
            damaged shard raises.
        kept: Hypotheses of an interrupted attempt, to which these are added.
    """
    same_features = own or load_spec(bundle).features == run.config.features.model_copy(update={"stored": False})
    speakers = FEATURES.record(run)["speakers"] if same_features else {}
    recognizer = Recognizer.load(bundle, decode, str(best_device(run.config.train.device)), _stats(speakers))
    url = set_url(run, name, recognition=True) if own else run.result("shard").store.child(name).url
    dataset = open_set(url, recognizer.spec.sample_rate, run.cache_folder)
    decode_all = partial(
        decode_set,
        recognizer,
        dataset,
        on_progress=on_progress,
        on_damage=on_damage,
        processes=run.runner.count,
    )
    if kept is None:
        return list(decode_all().values())
    with kept:
        return list(decode_all(known=kept.read(dataset.index), on_decoded=kept.add).values())


class KeptHypotheses(AbstractContextManager["KeptHypotheses"]):
    """Hypotheses of a set that are kept while it is decoded, in case that the stage is interrupted.

    They are written every few seconds, and when the block ends.

    Args:
        store: Where they are kept.
        name: The set.
        decode: Decoding parameters; hypotheses of others are ignored.
    """

    def __init__(self, store: ObjectStore, name: str, decode: DecodeConfig) -> None:
        self._store, self._folder = store, f"decoded-{name}"
        self._decode = digest_json(decode.model_dump(mode="json"))
        self._new: list[Row] = []
        self._count = 0
        self._written_at = time.monotonic()

    def read(self, index: ShardIndex) -> dict[int, Decoded]:
        """Those of an interrupted attempt, by row of the set's index."""
        known: dict[int, Decoded] = {}
        names = self._store.list(self._folder)
        for name in names:
            kept = self._store.read_json(name)
            if kept.get("decode") == self._decode:
                known |= {row: _joined(index.row(row), *values) for row, values in kept["rows"]}
        self._count = len(names)
        return known

    def add(self, decoded: Mapping[int, Decoded]) -> None:
        """Keep some more."""
        self._new += [[row, [entry.hyp, entry.score, entry.confidence]] for row, entry in decoded.items()]
        if time.monotonic() - self._written_at >= _KEEP_S:
            self._write()

    def _write(self) -> None:
        if self._new:
            document = {"decode": self._decode, "rows": self._new}
            self._store.write_json(f"{self._folder}/batches-{self._count:06d}.json", document)
            self._new, self._count = [], self._count + 1
        self._written_at = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        self._write()


def _stats(speakers: Mapping[str, Any]) -> dict[str, CmvnStats]:
    return {who: CmvnStats.from_dict(value) for who, value in speakers.items()}


class DecodeRecord(DamageRecord):
    """What was decoded, how fast, and with which values."""

    sets: list[str]
    """The decoded sets."""
    speed: NotRequired[dict[str, dict[str, float]]]
    """Seconds of decoding and of audio by set, except of a resumed stage."""
    tuning: NotRequired[dict[str, Any]]
    """What `tune_on_validation` found, with a section `tune`."""


def publish_hypotheses(output: StageOutput, name: str, decoded: list[Decoded], counts: dict[str, int]) -> None:
    """Write the hypotheses of a set, and count them."""
    write_table(output.store, f"{name}.parquet", [asdict(entry) for entry in decoded], _SCHEMA)
    output.store.write(f"{name}.hyp.trn", format_trn({entry.id: entry.hyp for entry in decoded}).encode())
    output.store.write(f"{name}.ref.trn", format_trn({entry.id: entry.ref for entry in decoded}).encode())
    counts["utterances"] += len(decoded)
    counts["empty"] += sum(not entry.hyp for entry in decoded)


def _inputs(run: Run) -> Inputs:
    digests = {name: set_digest(run, name, recognition=True) for name in scored_sets(run)}
    if run.bundle is None and not run.config.system.is_trained:
        config = {"gmm": address_content(config_of(run).recognize, without=("arpa",)), "prior": PRIOR_FRAMES}
        return config, digests | {"model": run.result("align").key, "graph": run.result("graph").key}
    config = {"decode": address_content(with_digests(run.config.decode))}
    digests["model"] = _model_digest(run)
    adaptation = adaptation_inputs(run)
    config, digests = config | adaptation[0], digests | adaptation[1]
    if source := stage_files(run):
        digests["graph" if run.config.decode.makes_graph else "language model"] = source["digest"]
    if run.config.rescoring is not None:
        digests["rescoring"] = rescoring_files(run)["digest"]
    if run.config.tune is not None:
        config |= tuned_inputs(run)
        digests["tuned on"] = set_digest(run, VALID, recognition=True)
    return config, digests


def _model_digest(run: Run) -> str:
    """Digest of the model that the run trained, or that it evaluates."""
    if run.bundle is not None:
        return bundle_digest(run.bundle)
    return TRAIN.record(run)["digest"]


def _work(run: Run, output: StageOutput) -> DecodeRecord:
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
        decode = run.config.decoder.model_copy(update=chosen)
        sharded = SHARD.record(run)["sets"]
        parts = progress.Parts("decode", {name: sharded[name]["utterances"] for name in record["sets"]})
        for name in record["sets"]:
            quarantine = set_quarantine(run, name, output.store)
            started = time.monotonic()
            decoded = _decode(run, output, bundle, name, decode, quarantine, partial(parts.report, name))
            if not resumed:
                speed[name] = {"seconds": time.monotonic() - started, "audio": sum(entry.duration for entry in decoded)}
            damaged += quarantine.entries()
            publish_hypotheses(output, name, decoded, counts)
    output.store.delete_tree(_WORK)
    add_damaged(record, damaged)
    return record


def _decode(
    run: Run,
    output: StageOutput,
    bundle: Path,
    name: str,
    decode: DecodeConfig,
    quarantine: ShardQuarantine,
    on_progress: Callable[[int, int], None],
) -> list[Decoded]:
    """Decode a set: in this process if the model is not the run's own, or the workers are its threads; else in workers.

    Threads decode speakers in parallel, whose answers are kept; what else they would take turns in is done here.

    Args:
        run: The run.
        output: The stage's output.
        bundle: The model.
        name: The set.
        decode: Decoding parameters, without the files that stages make.
        quarantine: Takes damaged shards.
        on_progress: Called with the number of finished utterances and of all.
    """
    source, by_speaker = stage_files(run), run.config.system.by_speaker(run.config.features)
    if run.bundle is not None or (run.runner.local and not by_speaker):
        whole = with_stage_files(decode, source)
        kept = KeptHypotheses(output.store.child(_WORK), name, decode)
        own = run.bundle is None
        return decode_with(run, bundle, name, whole, own, on_progress, quarantine.add, kept)
    index = ShardIndex.read(ObjectStore(set_url(run, name, recognition=True)))
    work = output.store.child(_WORK)
    common = {
        "work": work.url,
        "url": set_url(run, name, recognition=True),
        "bundle": bundle_source(run),
        "decode": decode.model_dump(mode="json"),
        "files": source,  # fetched by each worker, which may be on another machine
        "device": run.config.train.device,
        "speakers": {} if by_speaker else FEATURES.record(run)["speakers"],
    }
    pieces = _speaker_pieces(index, name) if by_speaker else _shard_pieces(index, name, run.runner)
    records = {record.name: record for record in index.shards}
    decoded: dict[int, Decoded] = {}
    given = (common | piece for piece in pieces)
    for answer in map_pieces(run.runner, "tasks.stages.decode:decode_piece", given, f"decode {name}"):
        decoded |= {row: _joined(index.row(row), *values) for row, values in answer["rows"]}
        for shard, reason in answer["damaged"]:
            quarantine.add(ShardError(reason, records[shard], reason))
        on_progress(len(decoded), len(index))
    return [decoded[row] for row in sorted(decoded)]


def _speaker_pieces(index: ShardIndex, name: str) -> Iterator[Piece]:
    """A piece for each speaker of a set: its rows, and where the answer is kept in case the run is killed."""
    for number, (speaker, rows) in enumerate(sorted(rows_by_speaker(index.column("speaker")).items())):
        yield {"name": speaker, "rows": rows, "result": f"decoded-{name}/{number}.json"}


def _shard_pieces(index: ShardIndex, name: str, runner: RunnerConfig) -> Iterator[Piece]:
    """Pieces of some shards of a set."""
    for numbers in share_out(len(index.shards), runner):
        label = piece_name(numbers)
        yield {"name": label, "shards": numbers, "result": f"decoded-{name}/shards-{label}.json"}


def _joined(about: Mapping[str, Any], hypothesis: str, score: float, confidence: float) -> Decoded:
    """A hypothesis with what the index says about the utterance."""
    return Decoded(
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


def decode_piece(piece: Piece) -> Answer:
    """Decode some rows or shards of a set: the answer that is kept, or a new one."""
    store = ObjectStore(piece["work"])
    if store.exists(piece["result"]):  # done before a kill
        kept: Answer = store.read_json(piece["result"])
        return kept
    damaged: list[tuple[str, str]] = []
    recognizer = _loaded(json.dumps({name: piece[name] for name in _PARTS}, sort_keys=True))
    dataset = open_set(piece["url"], recognizer.spec.sample_rate, home() / "cache")
    rows = piece.get("rows")
    if rows is None:
        rows = np.flatnonzero(np.isin(np.asarray(dataset.index.column("shard")), piece["shards"])).tolist()
    decoded = decode_set(recognizer, dataset, rows=rows, on_damage=lambda error: damaged.append(error.damage))
    answer = {
        "rows": [
            [row, [hypothesis.hyp, hypothesis.score, hypothesis.confidence]] for row, hypothesis in decoded.items()
        ],
        "damaged": [list(damage) for damage in damaged],
    }
    if not damaged:  # damaged shards may be repaired
        store.write_json(piece["result"], answer)
    return answer


_PARTS = ("bundle", "decode", "files", "device", "speakers")
"""What a piece says about its recognizer."""


@cached_once(maxsize=1)
def _loaded(description: str) -> Recognizer[Any]:
    """The recognizer of a piece; cached for further pieces in this process. It has read all its files."""
    parts = json.loads(description)
    decode: DecodeConfig = TypeAdapter(DecodeChoice).validate_python(parts["decode"])
    with tempfile.TemporaryDirectory(prefix="starling-model-") as folder:
        bundle = make_bundle(parts["bundle"], Path(folder))
        device = str(best_device(parts["device"]))
        recognizer = Recognizer.load(
            bundle, with_stage_files(decode, parts["files"]), device, _stats(parts["speakers"])
        )
        recognizer.prepare()
    return recognizer


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
        yield Artifact(result.markdown, counts_text(result.counts))


DECODE = Stage(
    "decode",
    6,
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
