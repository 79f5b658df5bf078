"""Copies of training utterances at other speeds, each as another speaker's utterance (Ko et al. 2015).

Some copies may have a speaker of their own: they are normalized and adapted alone, as single recordings are in
recognition, so that models are trained on such speech, too.

Copies are made with the shards, after all checks of the corpora, so that whatever reads shards has them: GMM-HMMs,
stored features, networks. What counts words, as language models do, leaves them out (`originals`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from configurable.lazy import pyarrow as pa

SPEED = "speed"
"""Column of `with_copies`."""
_NAMES = ("id", "speaker")


def _checked(speeds: tuple[float, ...]) -> tuple[float, ...]:
    for speed in speeds:
        if not 0.5 <= speed <= 2.0:
            raise ValueError(f"{speed:g} is not between 0.5 and 2")
        if speed == 1.0:
            raise ValueError("1 is the speed of the utterances themselves, which are always there: leave it out")
    if len({_suffix(speed) for speed in speeds}) < len(speeds):
        raise ValueError("two speeds are the same: leave out one of them")
    return speeds


Speeds = Annotated[tuple[float, ...], AfterValidator(_checked)]
"""Speeds of copies; pitch follows."""


def _suffix(speed: float) -> str:
    return f"-speed{speed:g}".replace(".", "_")  # a dot would end an id's name in a tar


def copy_name(name: str, speed: float) -> str:
    """Id or speaker of a copy: `84-121123-0001-speed0_9`.

    Args:
        name: Id or speaker of the utterance.
        speed: Speed of the copy; 1 is the utterance itself.
    """
    return name if speed == 1.0 else name + _suffix(speed)


def is_copy(name: str, speeds: Sequence[float]) -> bool:
    """Whether an utterance is a copy.

    Args:
        name: Its id.
        speeds: Speeds of the copies in its set.
    """
    return any(name.endswith(_suffix(speed)) for speed in speeds)


def is_lone(copy: str, share: float) -> bool:
    """Whether a copy is the only utterance of its speaker.

    Args:
        copy: Its id.
        share: Share of the copies for which this holds.
    """
    draw = int.from_bytes(hashlib.sha256(f"lone/{copy}".encode()).digest()[:8], "big") / 2**64
    return draw < share


def with_copies(
    manifest: Path, name: str, speeds: Sequence[float], lone: float = 0.0, columns: Sequence[str] | None = None
) -> Iterator[Any]:
    """Read the utterances of a set and then their copies, speed by speed.

    Args:
        manifest: The manifest's local file.
        name: The set.
        speeds: Speeds of the copies.
        lone: Share of the copies with a speaker of their own, named like the copy.
        columns: Columns to read; all by default.

    Yields:
        Arrow record batches with the column `speed` after the manifest's; ids, speakers and durations are the copies'.
    """
    from tasks.dataset.tables import batches  # imports pyarrow, which a configuration does not need

    for speed in (1.0, *speeds):
        for batch in batches(manifest, columns, {"set": name}):
            yield _at_speed(batch, speed, lone)


def _at_speed(batch: Any, speed: float, lone: float) -> Any:
    values = {field: batch.column(field) for field in batch.schema.names}
    if speed != 1.0:
        for field in _NAMES:
            if field in values:
                values[field] = pa.array([copy_name(name, speed) for name in values[field].to_pylist()], pa.string())
        if "speaker" in values and "id" in values:
            pairs = zip(values["id"].to_pylist(), values["speaker"].to_pylist(), strict=True)
            values["speaker"] = pa.array(
                [identity if is_lone(identity, lone) else who for identity, who in pairs], pa.string()
            )
        if "duration" in values:
            values["duration"] = pa.array(values["duration"].to_numpy() / speed)
    values[SPEED] = pa.array([speed] * batch.num_rows, pa.float64())
    return pa.RecordBatch.from_pydict(values)
