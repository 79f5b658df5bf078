"""What the report shows of single utterances: alignments, words with the most errors, audio of the worst ones."""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from speech.scoring import align, mark
from storage.index import ShardIndex
from storage.objects import ObjectStore, ObjectStoreError
from storage.reading import ShardError, ShardReader
from tasks.dataset.tables import read_table
from tasks.stages.base import Run

ALIGNMENTS = 3000
"""Maximum number of alignments of a set on the page; `SET.alignments.txt` among the artifacts has all."""
_WORST = 12
"""Number of utterances shown first, with their audio."""
_WORDS = 15


class MarkedUtterance(NamedTuple):
    """An utterance with its errors marked, as a row of a table."""

    id: str
    speaker: str
    errors: int
    words: int
    text: str


class WordErrors(NamedTuple):
    """How often a word of the references was not recognized, as a row of a table."""

    word: str
    errors: int
    spoken: int


class WorstUtterance(NamedTuple):
    """An utterance with many errors, for all of its speaker with the same words."""

    id: str
    speaker: str
    errors: int
    wrong: int
    """How many of these utterances have errors."""
    spoken: int
    """How many there are."""
    text: str
    """Its words with the errors marked."""


@dataclass(frozen=True)
class SetDetails:
    """Utterances of a scored set."""

    alignments: list[MarkedUtterance]
    """Those with the most errors first."""
    left_out: int
    """Number of utterances without an alignment here; they have the fewest errors."""
    words: list[WordErrors]
    """Words with the most errors first."""
    worst: list[WorstUtterance] = field(default_factory=list)
    """Those with the most errors, of each speaker and text one."""
    audio: dict[str, str] = field(default_factory=dict)
    """`data:` URL of the audio by utterance."""


def set_details(run: Run, name: str, worst: Iterable[Mapping[str, Any]] = (), budget: int = 0) -> SetDetails:
    """Details of one scored set.

    Args:
        run: The run, after the stage `score`.
        name: The set.
        worst: Its worst utterances, as the stage `score` writes them.
        budget: Maximum size of the audio in bytes; 0 leaves it out.
    """
    marked: list[MarkedUtterance] = []
    spoken, wrong = Counter[str](), Counter[str]()
    for row in read_table(run.result("decode").output, f"{name}.parquet"):
        ref = row["ref"].split()
        steps = align(ref, row["hyp"].split())
        missed = [word for operation, word, _ in steps if operation in ("sub", "del") and word is not None]
        errors = len(missed) + sum(operation == "ins" for operation, _, _ in steps)
        spoken.update(ref)
        wrong.update(missed)
        marked.append(MarkedUtterance(row["id"], row["speaker"], errors, len(ref), mark(steps)))
    marked.sort(key=lambda utterance: (-utterance.errors, utterance.words, utterance.id))
    shown = [_worst_utterance(entry) for entry in islice(worst, _WORST)]
    words = sorted(wrong.items(), key=lambda item: (-item[1], item[0]))[:_WORDS]
    return SetDetails(
        alignments=marked[:ALIGNMENTS],
        left_out=max(0, len(marked) - ALIGNMENTS),
        words=[WordErrors(word, count, spoken[word]) for word, count in words],
        worst=shown,
        audio=audio_of(run, name, [utterance.id for utterance in shown], budget),
    )


def _worst_utterance(entry: Mapping[str, Any]) -> WorstUtterance:
    text = mark(align(entry["ref"].split(), entry["hyp"].split()))
    return WorstUtterance(**{name: entry[name] for name in ("id", "speaker", "errors", "wrong", "spoken")}, text=text)


def audio_of(run: Run, name: str, ids: Iterable[str], budget: int) -> dict[str, str]:
    """Audio of the first utterances that fit into a size; those of damaged shards are left out.

    Args:
        run: The run, after the stage `shard`.
        name: The set.
        ids: Utterances, the most important ones first.
        budget: Maximum number of bytes of all files.

    Returns:
        By utterance, a `data:` URL of its FLAC file.
    """
    if not budget:
        return {}
    store = run.result("shard").store.child(name)
    reader, places = _reader(store, run.cache_folder)
    audio: dict[str, str] = {}
    for identity in ids:
        try:
            data = reader.payload(places[identity])
        except (KeyError, ShardError, ObjectStoreError):
            continue
        if len(data) > budget:
            break
        budget -= len(data)
        audio[identity] = f"data:audio/flac;base64,{base64.b64encode(data).decode()}"
    return audio


def _reader(store: ObjectStore, cache: Path) -> tuple[ShardReader, dict[str, int]]:
    index = ShardIndex.read(store)
    return ShardReader(store, index, cache), {str(who): row for row, who in enumerate(index.column("id"))}


def changes_of(decision: dict[str, Any]) -> list[list[Any]]:
    """Rows of utterances that challenger and champion recognize differently well."""
    return [
        [
            f"{change['set']}: {change['id']}",
            change["champion_errors"],
            change["challenger_errors"],
            *(mark(align(change["ref"].split(), change[who].split())) for who in ("champion", "challenger")),
        ]
        for change in decision["changes"]
    ]
