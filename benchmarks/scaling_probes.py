"""Measurements of `benchmarks.scaling`: step rates, CPU time, and an index to lease."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectStore


def rate(stamps: NDArray[np.float64], window: float, end: float) -> float:
    """Steps per second between the first and the last step end in the window; a plain count if there is only one."""
    inside = stamps[(stamps >= window) & (stamps <= end)]
    if len(inside) < 2:
        return len(inside) / (end - window)
    return float((len(inside) - 1) / (inside[-1] - inside[0]))


def write_index(url: str, num_shards: int, per_shard: int) -> None:
    """Write an index of utterances of one second, whose audio does not exist."""
    rows = num_shards * per_shard
    shard = np.repeat(np.arange(num_shards), per_shard)
    columns: dict[str, Any] = {
        name: pa.repeat("", rows) for name in ("text", "speaker", "corpus", "domain", "language")
    }
    columns |= {
        "id": pa.array(np.arange(rows)).cast(pa.string()),
        "shard": shard,
        "offset": np.zeros(rows),
        "length": np.ones(rows),
    }
    columns |= {"duration": np.ones(rows), "num_frames": np.full(rows, 16000), "sample_rate": np.full(rows, 16000)}
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    table = pa.table({field.name: arrays[field.name].cast(field.type) for field in SCHEMA})
    records = tuple(
        ShardRecord(f"{number:06d}.tar", per_shard, float(per_shard), 1, "0" * 64) for number in range(num_shards)
    )
    ShardIndex(table, records, {"payload": "flac"}).write(ObjectStore(url))


def machine_cpu() -> tuple[float, float]:
    """Busy and total seconds of the machine's cores since boot."""
    values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = values[3] + values[4]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(values) - idle) / ticks, sum(values) / ticks


def tree_cpu(root: int) -> float:
    """CPU seconds of a process and its live descendants."""
    return sum(seconds for _, seconds in _family(root).values())


def descendants(root: int) -> set[int]:
    """Live descendants of a process."""
    return set(_family(root)) - {root}


def running(process: int) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _family(root: int) -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of a process and its descendants."""
    processes: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        processes[int(path.parent.name)] = int(fields[1]), used
    family = {root} & set(processes)
    while more := {number for number, (parent, _) in processes.items() if parent in family} - family:
        family |= more
    return {number: processes[number] for number in family}
