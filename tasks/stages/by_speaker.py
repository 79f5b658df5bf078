"""Decoding of a set by speaker: a piece of work for each, whose answer is kept in case the run is killed.

    pieces = speaker_pieces(index, "test", common)
    answers = map_pieces(run.runner, "tasks.stages.module:function", pieces, "decode test")
    found = joined(answers, index, "test", quarantine)

A piece's function returns `answered(piece, work)`, where `work` decodes the rows of one speaker.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from recognition.inference import Decoded
from speech.hmm.utterances import by_speaker
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardError
from tasks.stages import progress
from tasks.stages.runner import Piece

Found = tuple[str, float, float]
"""Words, score and confidence of an utterance."""
Decoding = tuple[Mapping[int, Found], list[tuple[str, str]]]
"""What was found by row, and damaged shards with the reason."""
Answer = dict[str, Any]
"""`rows`: for each utterance its row and what was found; `damaged`: shards that could not be read, with the reason."""


def speaker_pieces(index: ShardIndex, name: str, common: Mapping[str, Any]) -> Iterator[Piece]:
    """A piece for each speaker of a set.

    Args:
        index: The set's index.
        name: The set.
        common: What all pieces have; among that `work`, the store for answers.
    """
    for number, (speaker, rows) in enumerate(sorted(by_speaker(index.column("speaker")).items())):
        yield {**common, "name": speaker, "rows": rows, "result": f"decoded-{name}/{number}.json"}


def answered(piece: Piece, work: Callable[[Sequence[int]], Decoding]) -> Answer:
    """The answer to a piece: the one that is kept, or a new one.

    Args:
        piece: A piece of `speaker_pieces`.
        work: Decodes rows of the index.
    """
    store = ObjectStore(piece["work"])
    if store.exists(piece["result"]):  # done before a kill
        kept: Answer = store.read_json(piece["result"])
        return kept
    found, damaged = work(piece["rows"])
    answer = {"rows": [[row, list(one)] for row, one in found.items()], "damaged": [list(one) for one in damaged]}
    if not damaged:  # damaged shards may be repaired
        store.write_json(piece["result"], answer)
    return answer


def joined(
    answers: Iterable[Answer], index: ShardIndex, name: str, quarantine: ShardQuarantine | None = None
) -> list[Decoded]:
    """Hypotheses of a set, in the order of its index.

    Args:
        answers: Of all pieces.
        index: The set's index.
        name: The set.
        quarantine: Takes damaged shards.
    """
    found: dict[int, Decoded] = {}
    records = {record.name: record for record in index.shards}
    for answer in answers:
        for row, (hypothesis, score, confidence) in answer["rows"]:
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
        for shard, reason in answer["damaged"]:
            assert quarantine is not None
            quarantine.add(ShardError(reason, records[shard], reason))
        progress.report("decode", len(found), len(index), name)
    return [found[row] for row in sorted(found)]
