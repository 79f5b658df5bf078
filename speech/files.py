"""Files that are there whole or not at all."""

import uuid
from pathlib import Path

from safetensors import SafetensorError

DAMAGED = (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SafetensorError)
"""What reading JSON and tensors raises if a file is missing, damaged, or its numbers and shapes do not fit together."""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a process that is killed meanwhile, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
