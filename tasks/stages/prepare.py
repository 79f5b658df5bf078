"""Stage prepare: read corpora, check every utterance, normalize transcripts, divide into sets.

The output is `utterances.parquet` (usable utterances), `text-changes.parquet` (changes to their transcripts) and
`quarantine.parquet` (unusable utterances, with the reason). The counts add up: read = written + quarantined + unused,
the last of which are training utterances that `share` or `min_confidence` of their source leaves out. One bad utterance
never stops a corpus; too many stop the run.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import pyarrow as pa

from configurable.addresses import address_content
from configurable.lazy import torch
from speech.audio import AudioError, level_db
from speech.fingerprint import Words, fingerprint
from speech.text import LanguageError, TextError, TextNormalizer
from storage.corpora import CorpusReader, Utterance
from storage.corpora.base import NOT_MEANT, overshoot
from storage.objects import ObjectStore
from storage.shards import ShardWriteError, member_key
from storage.stages import StageOutput
from tasks.config.data import DataConfig
from tasks.config.home import work_folder
from tasks.config.pipeline import worker_count
from tasks.dataset.audio import load_utterance_samples
from tasks.dataset.duplicates import (
    DUPLICATES,
    DUPLICATES_SCHEMA,
    SAME,
    DuplicateError,
    Fingerprints,
    data_warnings,
    treat_doubles,
)
from tasks.dataset.manifest import MANIFEST as MANIFEST
from tasks.dataset.manifest import (
    QUARANTINE,
    Quarantine,
    Refused,
    first_of_ids,
    refuse,
    rows_at,
    scratch_folder,
    write_manifest,
)
from tasks.dataset.sets import (
    CONFIDENCE,
    SOURCE,
    Mask,
    Sets,
    Unused,
    assign_sets,
    check_strata,
    kept_out_by,
    leave_out,
    source_numbers,
)
from tasks.dataset.sources import SourceConfig, is_name
from tasks.dataset.speakers import SetSpeakers, set_rows
from tasks.dataset.splits import TRAIN
from tasks.dataset.tables import TableWriter
from tasks.dataset.text_changes import TEXT_CHANGES, check_languages, write_text_changes
from tasks.figures import percent
from tasks.stages import progress
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageError, StageRecord, StageResult
from tasks.stages.quarantined import QuarantineError
from tasks.stages.sources import left_out, open_numbered, select, selects_nothing

_NOT_CONTENT = ("fold", "speeds", "lone_copies", "pauses", "sources.licence")
"""Fields of `data` that do not affect the output: the tested fold, copies in the shards, and licences."""
_WINDOW = 256

_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "set", "audio", "text", "raw_text", "speaker")],
        *[(name, pa.string()) for name in ("corpus", "domain", "language", "sha256")],
        *[(name, pa.float64()) for name in ("start", "end", "duration")],
        ("channel", pa.int32()),
        ("sample_rate", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("row", pa.int64()),
        ("column", pa.string()),
    ]
)


CHECKED_SCHEMA = _SCHEMA.append(pa.field(SOURCE, pa.int32())).append(pa.field(CONFIDENCE, pa.float64()))


@dataclass(frozen=True)
class Checked:
    """A usable utterance with its normalized text and the properties of its audio."""

    utterance: Utterance
    text: str
    sha256: str
    duration: float
    sample_rate: int
    words: Words | None = None
    """Acoustic fingerprint, if near-duplicates are searched for."""


def check(utterance: Utterance, data: DataConfig, normalizer: TextNormalizer) -> Checked | Refused:
    """Decode an utterance and check it against the limits."""

    def refused(reason: str, detail: str) -> Refused:
        return refuse(utterance.id, utterance.corpus, "prepare", reason, detail, utterance.audio)

    try:
        utterance.audio.encode()
        member_key(utterance.id)
        u = utterance
        "".join((u.text, u.speaker, u.split or "", u.language, u.domain, u.corpus)).encode()
    except ShardWriteError as error:
        return refused("bad-id", str(error))
    except UnicodeEncodeError as error:
        if error.object == utterance.audio:
            return refused("bad-name", f"the file name {utterance.audio} is not UTF-8: rename the file or its folder")
        return refused("bad-text", f"a field is not valid Unicode: {error.reason}")
    if utterance.split and not is_name(utterance.split):
        return refused("bad-set", f"set {utterance.split!r}: use letters, digits, '.', '_' and '-', at most 100")
    try:
        text = normalizer(utterance.text, utterance.language)
        samples, rate = load_utterance_samples(utterance, max_seconds=data.max_seconds)
    except AudioError as error:
        limit = f", data.max_seconds is {data.max_seconds}" if error.reason == "too-long" else ""
        return refused(error.reason, f"{error}{limit}")
    except TextError as error:
        return refused(error.reason, str(error))
    except LanguageError as error:
        return refused("language", str(error))
    seconds = len(samples) / rate
    if missing := _missing(utterance, seconds):
        return refused("bad-segment", missing)
    if seconds < data.min_seconds:
        return refused("too-short", f"{seconds:.3f} s, data.min_seconds is {data.min_seconds}")
    level = level_db(samples - samples.mean(dtype=np.float64))  # nobody hears the offset of a broken input
    if level < data.silence_db:
        return refused("silent", f"{level:.1f} dB, data.silence_db is {data.silence_db}")
    digest = hashlib.sha256(samples.tobytes()).hexdigest()
    words = fingerprint(torch.from_numpy(samples), rate) if data.duplicates.fingerprint else None
    return Checked(utterance, text, digest, seconds, rate, words)


def _missing(utterance: Utterance, seconds: float) -> str:
    """What the audio lacks of the times that the corpus declares; empty if nothing is missing."""
    start, end = utterance.start, utterance.end
    declared = utterance.duration if end is None else end - start
    if declared is None or not overshoot(declared, seconds):
        return ""
    if end is None:
        return f"the corpus declares {declared:.10g} s, and the audio has {seconds:.3f} s: correct the duration"
    return f"the segment from {start:.10g} s to {end:.10g} s ends after the audio, which has {start + seconds:.3f} s"


def check_all(utterances: Iterable[Utterance], data: DataConfig, workers: int) -> Iterator[Checked | Refused]:
    """Check utterances in threads (decoding releases the GIL); yields results in order, few at a time in memory."""
    normalizer = TextNormalizer(data.normalizer)
    source = iter(utterances)
    with ThreadPoolExecutor(workers) as pool:
        while window := list(islice(source, _WINDOW)):
            yield from pool.map(lambda u: check(u, data, normalizer), window)


def _row(checked: Checked, source: int) -> dict[str, Any]:
    u = checked.utterance
    return {
        SOURCE: source,
        CONFIDENCE: u.confidence if isinstance(u.confidence, float) else None,
        "id": u.id,
        "set": u.split or "",
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
        "offset": u.offset,
        "length": u.length,
        "row": u.row,
        "column": u.column,
    }


def _inputs(run: Run) -> Inputs:
    readers = [open_numbered(number, source) for number, source in enumerate(run.config.data.sources)]
    config = {"data": address_content(run.config.data, without=_NOT_CONTENT), "seed": run.config.seed}
    return config, {f"source-{i}": reader.fingerprint() for i, reader in enumerate(readers)}


def leaves_out(number: int, source: SourceConfig, utterance: Utterance, seed: int, left: Unused) -> bool:
    """Whether a source leaves an utterance out whatever sets there are; then it is counted, and not even decoded.

    Those of a source without `set` may become validation or test data: `leave_out` decides once there are sets.

    Args:
        number: The source's position in `data.sources`.
        source: The source.
        utterance: One that it selects.
        seed: Seed of the shares.
        left: Numbers of training utterances that are left out.
    """
    field = kept_out_by(source, utterance.id, utterance.confidence, seed) if source.set == TRAIN else ""
    if field:
        left[number, field] += 1
    return bool(field)


def _read_sources(
    run: Run, refused: Quarantine, numbers: deque[int], readers: list[CorpusReader], left: Unused
) -> Iterator[Utterance]:
    """Utterances of all sources; appends the position of each utterance's source to `numbers`, and finished readers.

    Raises:
        StageError: If a source selects nothing.
    """
    for number, source in enumerate(run.config.data.sources):
        reader = open_numbered(number, source)
        selected = False
        for utterance in select(number, source, reader):
            selected = True
            if not leaves_out(number, source, utterance, run.config.seed, left):
                numbers.append(number)
                yield utterance
        if not selected and not reader.problems:
            raise StageError(selects_nothing(number, source))
        readers.append(reader)
        for name, reason, detail in reader.problems:
            refused.add(refuse(name, reader.corpus, "read", reason, detail, ""))


def _check_sources(
    run: Run, path: Path, refused: Quarantine, prints: Fingerprints | None, left: Unused
) -> tuple[int, dict[str, Any]]:
    """Check all utterances and write usable ones to a local table; returns their number, and what was left out."""
    data, numbers, readers = run.config.data, deque[int](), list[CorpusReader]()
    utterances = _read_sources(run, refused, numbers, readers, left)
    with TableWriter(path, CHECKED_SCHEMA) as table:
        for result in check_all(utterances, data, worker_count(run.config.storage.workers)):
            number = numbers.popleft()  # results are in the order of the utterances
            if isinstance(result, Refused):
                refused.add(result)
            else:
                table.add(_row(result, number))
                if prints is not None and result.words is not None:
                    prints.add(result.words)
            progress.report("prepare", table.count + len(refused), 0, "checking")
    return table.count, left_out(readers)


def _refuse_rows(path: Path, rows: Mask, refused: Quarantine, why: Callable[[int], tuple[str, str]]) -> None:
    """Quarantine rows of the table of checked utterances; `why` returns reason and detail of a row."""
    for number, row in rows_at(path, ["id", "corpus", "audio"], rows):
        refused.add(refuse(row["id"], row["corpus"], "prepare", *why(number), row["audio"]))


def _treat_doubles(
    run: Run, output: StageOutput, path: Path, sets: Sets, prints: Fingerprints | None, refused: Quarantine
) -> dict[str, Any]:
    """List duplicates, and drop or reject them as configured; returns their counts, for the stage's record.

    Raises:
        DuplicateError: If the configuration rejects them.
    """
    with TableWriter(path.with_name(DUPLICATES), DUPLICATES_SCHEMA) as table:
        treated = treat_doubles(path, sets, prints, run.config.data.duplicates, table)
    output.store.write_file(DUPLICATES, table.path)
    if treated.refused:
        raise DuplicateError(f"{treated.refused} All are in {output.store.join(DUPLICATES)}.")
    dropped = np.zeros(len(sets.codes), dtype=bool)
    dropped[list(treated.dropped)] = True

    def why(row: int) -> tuple[str, str]:
        line = treated.dropped[row]
        reason = "duplicate" if line["kind"] == SAME else line["kind"]
        return reason, f"the same as {line['other_id']} in {line['other_set']} ({line['kind']}, {line['where']})"

    _refuse_rows(path, dropped, refused, why)
    sets.codes[dropped] = -1
    left = run.config.data.duplicates.overlap == "keep"  # what training still has
    heard = {
        name: {**counts, "left": left * counts.get("training", 0)} for name, counts in treated.contaminated.items()
    }
    return {"duplicates": treated.counts, "contaminated": heard}


class PreparedSet(TypedDict):
    """A set of utterances."""

    utterances: int
    """Their number."""
    seconds: float
    """Of audio."""
    speakers: int
    """Number of known speakers."""
    unnamed: NotRequired[int]
    """Number of utterances whose speaker is unknown."""


class PrepareRecord(StageRecord):
    """The sets of utterances, and what is not in them."""

    sets: dict[str, PreparedSet]
    """The sets by name."""
    digest: str
    """Of the utterances: what shards are made from."""
    reasons: dict[str, int]
    """Number of quarantined utterances by reason."""
    duplicates: dict[str, Any]
    """Number of duplicates by kind."""
    contaminated: dict[str, Any]
    """Number of utterances of each test set that are in the training set, too."""
    shared_speakers: dict[str, Any]
    """Speakers of each test set that are in the training set, too."""
    text: dict[str, Any]
    """How normalization has changed transcripts."""
    tags: NotRequired[dict[str, int]]
    """Tags that were removed from transcripts."""
    unused: NotRequired[list[dict[str, Any]]]
    """Training utterances that are left out: position and field of the source, the field's value, and their number."""
    passed_over: NotRequired[dict[str, Any]]
    """Files in the folders of the corpus that belong to no utterance."""


def _work(run: Run, output: StageOutput) -> PrepareRecord:
    # named after the output, whose lock one process holds at a time: remains of a killed process are removed
    with scratch_folder(work_folder("prepare", output.key)) as folder:
        return _prepare(run, output, folder)


def _prepare(run: Run, output: StageOutput, folder: Path) -> PrepareRecord:
    data, checked = run.config.data, folder / "checked.parquet"
    check_languages(data)
    check_strata(data, CHECKED_SCHEMA.names)
    refused = Quarantine(folder / QUARANTINE)
    prints = Fingerprints(folder / "fingerprints") if data.duplicates.fingerprint else None
    left = Unused()
    total, passed = _check_sources(run, checked, refused, prints, left)
    used = first_of_ids(checked)
    _refuse_rows(checked, ~used, refused, lambda _: ("duplicate-id", "an earlier one has this id"))
    _enforce_limit(data, total - int((~used).sum()), refused, output.store)
    _check_each_source(checked, used, data, refused, output.store, left)
    sets = assign_sets(checked, used, data, run.config.seed)
    left += leave_out(checked, sets, data, run.config.seed)
    doubles = _treat_doubles(run, output, checked, sets, prints, refused)
    refused.publish(output.store)
    speakers = SetSpeakers(checked, sets)
    speakers.check(data)
    about = write_manifest(checked, sets, folder / MANIFEST, _SCHEMA)
    output.store.write_file(MANIFEST, folder / MANIFEST)
    text = write_text_changes(folder / MANIFEST, folder / TEXT_CHANGES)
    output.store.write_file(TEXT_CHANGES, folder / TEXT_CHANGES)
    written = about.pop("written")
    for name, counts in speakers.counts().items():
        about["sets"][name] |= counts
    record = {
        "counts": _counts(written, len(refused), left.total()),
        "reasons": dict(refused.reasons),
        **doubles,
        "shared_speakers": speakers.record(),
        "text": text,
        **passed,
        **({"unused": unused_entries(data, left)} if left else {}),
        **about,
    }
    return cast("PrepareRecord", record)


def _counts(written: int, quarantined: int, left: int) -> dict[str, int]:
    """The stage's counts: read = written + quarantined + unused; the last is there only if there are any."""
    counts = {"read": written + quarantined + left, "written": written, "quarantined": quarantined}
    return counts | ({"unused": left} if left else {})


def unused_entries(data: DataConfig, left: Unused) -> list[dict[str, Any]]:
    """Training utterances that are left out, by source and by its field that leaves them out."""
    return [
        {"source": number, "field": field, "value": getattr(data.sources[number], field), "utterances": count}
        for (number, field), count in sorted(left.items())
    ]


def _enforce_limit(data: DataConfig, usable: int, refused: Quarantine, store: ObjectStore) -> None:
    faulty = sum(count for reason, count in refused.reasons.items() if reason not in NOT_MEANT)
    total = usable + faulty
    if faulty > data.max_quarantined * total or not usable:
        refused.publish(store)
        reasons = ", ".join(f"{n} {reason}" for reason, n in refused.reasons.most_common(4))
        first = refused.first
        assert first is not None
        raise QuarantineError(
            f"{len(refused)} of {usable + len(refused)} utterances are quarantined ({reasons}), more than "
            f"data.max_quarantined ({percent(data.max_quarantined, 0)}); the first: {first.id}: {first.detail}. All "
            f"are in {store.join(QUARANTINE)}. Repair the corpus (`starling corpus inspect` lists what is wrong with "
            "it) or raise the limit, for example with --set data.max_quarantined=0.5"
        )


def _check_each_source(
    path: Path, used: Mask, data: DataConfig, refused: Quarantine, store: ObjectStore, left: Unused
) -> None:
    """Check that each source has a usable utterance: without its set, another one would be divided instead.

    Raises:
        QuarantineError: If all utterances of a source are quarantined or left out.
    """
    present = set(source_numbers(path, len(used))[used].tolist())
    for number, source in enumerate(data.sources):
        if number not in present:
            refused.publish(store)
            if fields := [name for name in ("min_confidence", "share") if left[number, name]]:
                limits = " and ".join(f"{name} {getattr(source, name):g}" for name in fields)
                change = "lower min_confidence" if "min_confidence" in fields else "raise it"
                raise QuarantineError(
                    f"data.sources.{number}: {limits} leaves none of its utterances: {change}, or remove the source"
                )
            what = f", and with it the set {source.set!r}" if source.set else ""
            raise QuarantineError(
                f"data.sources.{number}: all utterances of {source.path or source.kind} are quarantined{what}. They "
                f"are in {store.join(QUARANTINE)}, with the reasons: repair the corpus, or remove the source"
            )


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    text = "\n\n".join([result.markdown, *data_warnings(result.record, run.config.data)])
    yield Artifact(set_rows(result.record), text)


PREPARE = Stage(
    "prepare",
    10,
    _inputs,
    _work,
    artifacts=_artifacts,
    evaluates=True,
    reads="corpora",
    writes="`utterances.parquet`, `text-changes.parquet`, `quarantine.parquet`, `duplicates.parquet`",
)
