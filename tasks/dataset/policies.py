"""Configuration of the policies for duplicate utterances and for concurrent runs."""

from typing import Literal

from pydantic import Field

from configurable.configuration import Configuration
from configurable.former_fields import former_fields

Policy = Literal["keep", "drop", "refuse"]


class DuplicatesConfig(Configuration):
    """Policies for duplicate utterances. Duplicates are counted, and listed in `duplicates.parquet`."""

    fingerprint: bool = True
    """Also search for near-duplicates: the same recording re-encoded, padded, or with another rate or gain, and
    recordings that contain others. Copies at another speed or pitch, or with much noise, are not found."""
    within: Policy = "keep"
    """For the same recording twice in one set: `keep` both, `drop` all but the first (and recordings that another one
    contains), or `refuse` to run."""
    overlap: Policy = "refuse"
    """For the same recording in the training set and in another set: `keep` both, `drop` it from training, or `refuse`
    to run."""
    validation: Policy = "keep"
    """For the same recording in the validation set and in a test set: `keep` both and warn, `drop` it from validation,
    or `refuse` to run."""
    same_text: Policy = "keep"
    """For the same text by the same speaker in the training set and in another set: `keep` both, `drop` it from
    training, or `refuse` to run."""

    _former = former_fields(bit_errors=0.17)


class SlotsConfig(Configuration):
    """Policy for runs that make the same output or need the same GPUs at the same time."""

    collision: Literal["wait", "refuse"] = "wait"
    """If another run makes the same output or trains in the same pool: `wait` for it, or `refuse` to run."""
    wait_hours: float = Field(default=12.0, gt=0, le=24 * 14)
    """Maximum wait in hours."""
    trainings: int = Field(default=1, ge=0, le=100)
    """Maximum number of simultaneous trainings in a pool; 0: unlimited."""
    pool: str = ""
    """Pool of GPUs that the training belongs to; by default `train.launch.pool` if nodes are Prefect runs, otherwise
    this machine."""
