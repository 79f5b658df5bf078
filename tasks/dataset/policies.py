"""The configuration of what is done about speech that comes twice."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Policy = Literal["keep", "drop", "refuse"]


class DuplicatesConfig(BaseModel):
    """What becomes of speech that comes twice. All of it is counted, and listed in `duplicates.parquet`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    fingerprint: bool = True
    """Look for near-duplicates, too: the same recording re-encoded, padded, at another rate or gain."""
    bit_errors: float = Field(default=0.17, gt=0, lt=0.4)
    """Recordings whose fingerprints differ in a smaller share of their bits are near-duplicates; the limit is lower
    for short ones (0.14 at half a second), of which two takes may be much alike."""
    within: Policy = "keep"
    """The same recording again in one set: `keep` it, `drop` all but the first, or `refuse` to run."""
    overlap: Policy = "refuse"
    """The same recording in the training set and in another one: `keep` both, `drop` it from training, or `refuse`."""
    same_text: Policy = "keep"
    """The same text by the same speaker in the training set and in another one: `keep`, `drop` from training, or
    `refuse`."""


class SlotsConfig(BaseModel):
    """What happens when runs want the same at the same time."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    collision: Literal["wait", "refuse"] = "wait"
    """When another run makes the same output, or trains in the same pool: wait for it, or end with a message."""
    wait_hours: float = Field(default=12.0, gt=0, le=24 * 14)
    """Longest wait."""
    trainings: int = Field(default=1, ge=0, le=100)
    """Trainings at once in a pool; 0 is any number."""
    pool: str = ""
    """Pool of GPUs that the training counts for; by default `train.launch.pool` where nodes are Prefect runs, otherwise
    this machine."""
