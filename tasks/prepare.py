"""Stage 1, prepare: read corpora, check every utterance, normalize transcripts, divide into sets.

The output is `utterances.parquet` (what can be used) and `quarantine.parquet` (what cannot, and why); the counts add
up: read = written + quarantined. One bad utterance never stops a corpus; too many of them stop the run.
"""

import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from speech.audio import AudioError, decode_audio, level_db
from speech.synthesis.corpus import SynthesisConfig, synthesize_corpus
from speech.text import TextError, TextNormalizer
from storage.corpora import Utterance, open_corpus
from storage.corpora.base import CorpusReader
from storage.locks import file_lock
from storage.objects import ObjectStore
from storage.shards import ShardWriteError, member_key
from storage.stages import StageOutput, digest_json
from tasks import progress
from tasks.config import ConfigError, DataConfig, SourceConfig, is_name
from tasks.home import home
from tasks.splits import Item, split_utterances
from tasks.stage import LOCK_WAIT_S, Inputs, Run, Stage, StageError

MANIFEST, QUARANTINE = "utterances.parquet", "quarantine.parquet"
_WINDOW = 256

_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "set", "audio", "text", "raw_text", "speaker")],
        *[(name, pa.string()) for name in ("corpus", "domain", "language", "sha256")],
        *[(name, pa.float64()) for name in ("start", "end", "duration")],
        ("channel", pa.int32()),
        ("sample_rate", pa.int32()),
    ]
)
_QUARANTINE_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "corpus", "stage", "reason", "detail", "audio")])


class QuarantineError(StageError):
    """A larger share of the utterances is unusable than the configuration allows."""


@dataclass(frozen=True)
class Refused:
    """An utterance that cannot be used."""

    id: str
    corpus: str
    stage: str
    reason: str
    detail: str
    audio: str


def refuse(*fields: str) -> Refused:
    """A refusal whose fields can be written: what is not valid Unicode is escaped."""
    return Refused(*(field.encode("utf-8", "backslashreplace").decode() for field in fields))


@dataclass(frozen=True)
class Checked:
    """A usable utterance with its normalized text and what its audio was found to be."""

    utterance: Utterance
    text: str
    sha256: str
    duration: float
    sample_rate: int


def open_source(source: SourceConfig) -> CorpusReader:
    """The reader of a configured source; synthetic speech is made first, once, below the data folder."""
    if source.kind == "synthetic":
        config = source.synthesis or SynthesisConfig()
        folder = home() / "corpora" / f"synthetic-{digest_json(config.model_dump(mode='json'))[:16]}"
        with file_lock(folder.with_suffix(".lock"), LOCK_WAIT_S):  # runs that want the same speech make it once
            synthesize_corpus(
                config, folder, lambda done, total: progress.report("prepare", done, total, "synthesizing")
            )
        name = source.corpus or "synthetic"
        table = str(folder / "metadata.csv")
        return open_corpus("table", table, corpus=name, domain=source.domain, language=source.language)
    if unset := re.search(r"\$\{?(\w+)", source.path):
        raise ConfigError(
            f"data.sources: the path {source.path!r} needs the environment variable {unset[1]}: export "
            f"{unset[1]}=FOLDER, or write the path itself"
        )
    options: dict[str, Any] = {"where": source.where} if source.where else {}
    return open_corpus(
        source.kind,
        source.path,
        corpus=source.corpus or Path(source.path).stem,
        domain=source.domain,
        language=source.language,
        **options,
    )


def select(source: SourceConfig, reader: Iterable[Utterance]) -> Iterator[Utterance]:
    """The utterances that a source asks for, with their set where the source names one."""

    def wanted(utterance: Utterance) -> bool:
        only, without = source.speakers, source.exclude_speakers
        return (not only or utterance.speaker in only) and utterance.speaker not in without

    chosen = (u for u in reader if wanted(u))
    for utterance in islice(chosen, source.limit) if source.limit else chosen:
        yield replace(utterance, split=source.set) if source.set else utterance


def check(utterance: Utterance, data: DataConfig, normalizer: TextNormalizer) -> Checked | Refused:
    """Decode an utterance and check it against the limits."""

    def refused(reason: str, detail: str) -> Refused:
        return refuse(utterance.id, utterance.corpus, "prepare", reason, detail, utterance.audio)

    try:
        member_key(utterance.id)
        "".join((utterance.text, utterance.speaker, utterance.audio, utterance.split or "")).encode()
    except ShardWriteError as error:
        return refused("bad-id", str(error))
    except UnicodeEncodeError as error:
        return refused("bad-text", f"text, speaker, set or file name is not valid Unicode: {error.reason}")
    if utterance.split and not is_name(utterance.split):
        return refused("bad-set", f"set {utterance.split!r}: use letters, digits, '.', '_' and '-'")
    try:
        text = normalizer(utterance.text)
        wave, rate = decode_audio(utterance.audio, start=utterance.start, end=utterance.end, channel=utterance.channel)
    except (TextError, AudioError) as error:
        return refused(error.reason, str(error))
    seconds = len(wave) / rate
    if seconds < data.min_seconds:
        return refused("too-short", f"{seconds:.3f} s, data.min_seconds is {data.min_seconds}")
    if seconds > data.max_seconds:
        return refused("too-long", f"{seconds:.3f} s, data.max_seconds is {data.max_seconds}")
    level = level_db(wave)
    if level < data.silence_db:
        return refused("silent", f"{level:.1f} dB, data.silence_db is {data.silence_db}")
    digest = hashlib.sha256(wave.numpy().tobytes()).hexdigest()
    return Checked(utterance, text, digest, seconds, rate)


def check_all(utterances: Iterable[Utterance], data: DataConfig, workers: int) -> Iterator[Checked | Refused]:
    """Check utterances in threads (decoding releases the interpreter lock), in order, few at a time in memory."""
    normalizer = TextNormalizer(data.normalizer)
    seen: set[str] = set()
    source = iter(utterances)
    with ThreadPoolExecutor(workers) as pool:
        while window := list(islice(source, _WINDOW)):
            for result in pool.map(lambda u: check(u, data, normalizer), window):
                if isinstance(result, Checked):
                    if result.utterance.id in seen:
                        u = result.utterance
                        yield refuse(u.id, u.corpus, "prepare", "duplicate-id", "an earlier one has this id", u.audio)
                        continue
                    seen.add(result.utterance.id)
                yield result


def assign_sets(checked: list[Checked], data: DataConfig, seed: int) -> dict[str, str]:
    """Set of each utterance: its source's or corpus' own, else by a split; a set that exists takes no share."""
    sets = {c.utterance.id: c.utterance.split for c in checked if c.utterance.split}
    free = [Item(c.utterance.id, c.utterance.speaker) for c in checked if not c.utterance.split]
    if not free:
        return sets
    present = set(sets.values())
    shares = {
        "valid": 0.0 if "valid" in present else data.valid_share,
        "test": 0.0 if present - {"train", "valid"} else data.test_share,
    }
    return {**sets, **split_utterances(free, shares, by=data.split_by, seed=seed)}


def worker_count(configured: int) -> int:
    """Threads to use: the configured number, or one per core."""
    return configured or os.cpu_count() or 1


def write_table(store: ObjectStore, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Write rows as one Parquet file, whole or not at all."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer)
    store.write(name, buffer.getvalue())


def read_table(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    """Rows of a Parquet file."""
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(store.read(name))).to_pylist()
    return rows


def _row(checked: Checked, sets: dict[str, str]) -> dict[str, Any]:
    u = checked.utterance
    return {
        "id": u.id,
        "set": sets[u.id],
        "audio": u.audio,
        "text": checked.text,
        "raw_text": u.text,
        "speaker": u.speaker,
        "corpus": u.corpus,
        "domain": u.domain,
        "language": u.language,
        "sha256": checked.sha256,
        "start": u.start,
        "end": u.end,
        "channel": u.channel,
        "duration": checked.duration,
        "sample_rate": checked.sample_rate,
    }


def _inputs(run: Run) -> Inputs:
    readers = [open_source(source) for source in run.config.data.sources]
    config = {"data": run.config.data.model_dump(mode="json"), "seed": run.config.seed}
    return config, {f"source-{i}": reader.fingerprint() for i, reader in enumerate(readers)}


def _read_sources(run: Run, refused: list[Refused]) -> Iterator[Utterance]:
    for source in run.config.data.sources:
        reader = open_source(source)
        yield from select(source, reader)
        refused += [
            refuse(name, source.corpus or Path(source.path).stem, "read", reason, detail, "")
            for name, reason, detail in reader.problems
        ]


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    data = run.config.data
    refused: list[Refused] = []
    checked: list[Checked] = []
    for result in check_all(_read_sources(run, refused), data, worker_count(run.config.storage.workers)):
        if isinstance(result, Checked):
            checked.append(result)
        else:
            refused.append(result)
        progress.report("prepare", len(checked) + len(refused), 0, "checking")
    write_table(output.store, QUARANTINE, [vars(r) for r in refused], _QUARANTINE_SCHEMA)
    _enforce_limit(data, checked, refused, output.store.join(QUARANTINE))
    sets = assign_sets(checked, data, run.config.seed)
    rows = [_row(c, sets) for c in checked]
    write_table(output.store, MANIFEST, rows, _SCHEMA)
    # the digest leaves paths out: a corpus that has only moved needs no new shards
    content = [[row[k] for k in row if k not in ("audio", "raw_text", "start", "end", "channel")] for row in rows]
    by_set = Counter(sets.values())
    seconds: Counter[str] = Counter()
    for row in rows:
        seconds[row["set"]] += row["duration"]
    return {
        "counts": {"read": len(rows) + len(refused), "written": len(rows), "quarantined": len(refused)},
        "reasons": dict(Counter(r.reason for r in refused)),
        "sets": {name: {"utterances": by_set[name], "seconds": seconds[name]} for name in sorted(by_set)},
        "digest": digest_json(content),
    }


def _enforce_limit(data: DataConfig, checked: list[Checked], refused: list[Refused], table: str) -> None:
    total = len(checked) + len(refused)
    if total == 0:
        raise StageError("the sources hold no utterance: look at data.sources (`starling corpus inspect PATH` helps)")
    if len(refused) > data.max_quarantined * total or not checked:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(r.reason for r in refused).most_common(4))
        first = refused[0]
        raise QuarantineError(
            f"{len(refused)} of {total} utterances are quarantined ({reasons}), more than data.max_quarantined "
            f"({data.max_quarantined:.0%}); the first: {first.id}: {first.detail}. All are in {table}. Mend the corpus "
            "or raise the limit."
        )


PREPARE = Stage("prepare", 1, _inputs, _work)
