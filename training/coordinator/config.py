"""Configuration of membership: heartbeats and time limits."""

from pydantic import Field

from configurable.configuration import Configuration


class MembershipConfig(Configuration):
    """When nodes count as lost, and other time limits."""

    beat_s: float = Field(default=0.5, gt=0)
    """Seconds between a node's heartbeats to the coordinator."""
    dead_after_s: float = Field(default=10.0, gt=0)
    """A node without a heartbeat for this long is dropped; its unfinished leases return to the pool."""
    start_patience_s: float = Field(default=120.0, gt=0)
    """Training starts without the missing nodes if not all have joined after this time."""
    coordinator_grace_s: float = Field(default=10.0, gt=0)
    """A node without work or an answer from the coordinator trains a share of its own after this time."""
    coordinator_patience_s: float = Field(default=600.0, gt=0)
    """A node without any answer from the coordinator for this long gives up."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of a node's processes; after each, the node rejoins the ring as a newcomer."""
    max_bad_steps: int = Field(default=20, ge=1)
    """After this many steps in a row without a finite loss a node takes its weights from a neighbour."""
