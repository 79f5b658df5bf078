"""Segments: short pieces of utterances as the units of training, cut from stored features.

Frame-level objectives do not need whole utterances. Published hybrid systems train on non-overlapping segments of 21
frames, and count batches in segments (Zhang et al. 2019, arXiv:1907.05701). Longer chunks with context on either side
train networks that see wide windows. A set of segments is a set of shards like any other, so that batches, sampling,
leases and strategies work with segments as with utterances.

Segment k of utterance u has the id `u@k`. Its own frames are k * frames to (k + 1) * frames - 1, the last segment's may
be fewer; up to `context` frames before and after them are input only and have no target.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from configurable.configuration import Configuration
from configurable.former_fields import former_fields
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardError, ShardReader
from storage.shards import Sample, build_index, load_part, write_shard

_COPIED = ("speaker", "corpus", "domain", "language", "sample_rate")
_FRAMES, _CONTEXT = "segment_frames", "segment_context"


class SegmentConfig(Configuration):
    """Training on segments of utterances instead of whole ones."""

    frames: int = Field(default=21, ge=1)
    """Stored feature frames of a segment (published: 21)."""
    context: int = Field(default=0, ge=0)
    """Frames before and after a segment that the network sees, too, but is not trained to classify."""

    _former = former_fields(keep_rest=True)

    def spans(self, num_frames: int) -> list[tuple[int, int]]:
        """First own frame and end of each segment of an utterance; the last one may be shorter."""
        return [(start, min(start + self.frames, num_frames)) for start in range(0, num_frames, self.frames)]

    def seen(self, span: tuple[int, int], num_frames: int) -> tuple[int, int]:
        """First frame and end of what the network sees of a segment."""
        return max(0, span[0] - self.context), min(num_frames, span[1] + self.context)


def segments_of(index: ShardIndex) -> SegmentConfig | None:
    """How a set was cut; None for a set of utterances."""
    if _FRAMES not in index.metadata:
        return None
    return SegmentConfig(frames=int(index.metadata[_FRAMES]), context=int(index.metadata[_CONTEXT]))


def parse_id(name: str) -> tuple[str, int]:
    """Utterance and number of a segment."""
    utterance, _, number = name.rpartition("@")
    return utterance, int(number)


def cut_set(
    source: ObjectStore,
    target: ObjectStore,
    cfg: SegmentConfig,
    hop_s: float,
    cache: Path,
    quarantine: ShardQuarantine | None = None,
) -> ShardIndex:
    """Cut a set of stored features into a set of segments; shards that are there already are kept.

    Args:
        source: Store of the set.
        target: Store of the segments.
        cfg: How to cut.
        hop_s: Time between two frames, seconds.
        cache: Local folder for copies of remote shards.
        quarantine: Records damaged shards, which are then left out; None raises for them.

    Returns:
        The index of the segments.

    Raises:
        ValueError: The set has audio.
        ShardError: A shard is damaged and there is no quarantine.
        TooManyShardsError: If there is one, and more is lost than its limit.
    """
    index = ShardIndex.read(source)
    if index.metadata["payload"] != "npy":
        raise ValueError(f"{source.url} has audio, but segments are cut from features: set features.stored=true")
    reader = ShardReader(source, index, cache)
    shard_of = np.asarray(index.column("shard"))
    kept = []
    for number, record in enumerate(index.shards):
        rows = np.flatnonzero(shard_of == number)
        part = load_part(target, record.name)
        try:
            part = part or write_shard(target, record.name, _samples(index, reader, rows, cfg, hop_s), payload="npy")
        except ShardError as error:
            if quarantine is None:
                raise
            quarantine.add(error, [index.row(int(row))["id"] for row in rows])
            continue
        kept.append(part)
    metadata = {"payload": "npy", _FRAMES: str(cfg.frames), _CONTEXT: str(cfg.context)}
    cut = build_index(kept, metadata)
    cut.write(target)
    return cut


def _samples(
    index: ShardIndex, reader: ShardReader, rows: NDArray[np.int64], cfg: SegmentConfig, hop_s: float
) -> Iterator[Sample]:
    for place in rows.tolist():
        row = index.row(place)
        try:
            feats = np.load(io.BytesIO(reader.payload(place)), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise reader.undecodable(place, error) from error
        for number, span in enumerate(cfg.spans(len(feats))):
            first, end = cfg.seen(span, len(feats))
            data = io.BytesIO()
            np.save(data, feats[first:end], allow_pickle=False)
            fields = {name: row[name] for name in _COPIED}
            fields |= {"num_frames": end - first, "duration": (end - first) * hop_s, "text": ""}
            yield Sample(f"{row['id']}@{number}", {"npy": data.getvalue()}, fields)
