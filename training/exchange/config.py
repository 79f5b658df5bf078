"""Configuration of the exchange."""

from typing import Literal

from pydantic import Field, model_validator

from configurable.configuration import Configuration


class ExchangeConfig(Configuration):
    """How nodes average their weights with neighbours."""

    kind: Literal["auto", "zmq", "cuda"] = "auto"
    """`zmq`: weights travel encrypted between processes; `cuda`: for GPUs of one machine, weights stay in GPU memory;
    `auto`: `cuda` where that is possible, else `zmq`. The log of each rank says which it is."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Weights on the wire; bf16 halves the bytes and cannot average out differences below its rounding."""
    cpu_share: float = Field(default=0.05, ge=0, le=1)
    """Maximum share of one core that a learner's exchanges may use for it to start another one in the same step; the
    first one of a step always starts."""
    chunk_kb: int = Field(default=1024, ge=16, le=65536)
    """Maximum size of a message in KiB: sending, receiving and averaging overlap chunk by chunk."""
    daemons: int = Field(default=1, ge=1, le=16)
    """Processes that average a learner's weights, each a part of them: use more if the model is so large and the
    network so fast that one process is limited by its core."""
    timeout_s: float = Field(default=5.0, gt=0)
    """A neighbour that does not answer for this long is not asked for a while."""
    encrypt: bool = True
    """Authenticate and encrypt; if false, only loopback addresses are allowed."""

    @model_validator(mode="after")
    def _check_cuda(self) -> "ExchangeConfig":
        if self.kind == "cuda" and (self.wire != "fp32" or self.daemons > 1):
            raise ValueError(
                f"exchange.kind is cuda, wire {self.wire} and daemons {self.daemons}: weights stay in GPU memory, so "
                "use wire=fp32 and daemons=1, or kind=zmq"
            )
        return self
