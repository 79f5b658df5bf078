"""Errors about damaged objects: one line with the URL, the reason and the remedy.

    with readable(store.join("sets.json")):
        sets = json.loads(data)["sets"]       # any error is converted to a `DamagedObjectError`

Libraries report damaged files in various ways ("Received invalid number of bytes"), but never name the file.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

    from storage.objects import ObjectStore

_OUTPUT_URL = re.compile(r"(.+?)/[a-z][a-z0-9_-]*/[0-9a-f]{16}(?:/|$)")
_CHUNK = 8 << 20  # bytes of an object that are in memory while its SHA-256 is computed
_UNREADABLE = (
    SafetensorError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    RecursionError,
    OverflowError,
)
"""Exceptions of libraries other than Arrow, and of our code that uses their results, on damaged bytes."""


class DamagedObjectError(ValueError):
    """An object is damaged; the message contains its URL and the remedy.

    Attributes:
        reason: what is wrong, in a few words.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


def remedy(url: str) -> str:
    """The remedy for a missing or damaged object."""
    if match := _OUTPUT_URL.match(url):
        return (
            f"`starling storage verify --repair --url {match[1]}` removes damaged objects and their stage's record; "
            "then run the pipeline again to recreate them"
        )
    return "Delete it (a shard with its part file), and rerun the program that writes it"


def damaged(url: str, reason: object, what: str = "is damaged") -> DamagedObjectError:
    """Create the error for a damaged object."""
    text = " ".join(str(reason).split())[:300]
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}" if text else type(reason).__name__
    return DamagedObjectError(f"{url} {what} ({text}). {remedy(url)}.", f"it {what} ({text})")


@contextmanager
def readable(url: str, what: str = "is damaged") -> Iterator[None]:
    """Convert errors of libraries about an object's content to a `DamagedObjectError` that names the object.

    Keep the block small: a bug in our own code inside it would be reported as damage.

    Args:
        url: URL of the object.
        what: what is wrong with it, for the message.

    Raises:
        DamagedObjectError: the block could not read the object.
    """
    try:
        yield
    except DamagedObjectError:
        raise
    except _unreadable() as error:
        raise damaged(url, error, what) from error
    except OSError as error:
        # Arrow's errors about a Parquet file's content have no errno; system errors have one, store errors name their
        # URL
        if type(error) is not OSError or error.errno is not None:
            raise
        raise damaged(url, error, what) from error


def _unreadable() -> tuple[type[BaseException], ...]:
    # The training engine without the pipeline has no Arrow. Arrow raises its errors only after it has been imported.
    arrow = sys.modules.get("pyarrow")
    return (*_UNREADABLE, arrow.ArrowException) if arrow is not None else _UNREADABLE


def parse_json(url: str, data: bytes) -> Any:
    """Parse the bytes of a JSON object.

    Raises:
        DamagedObjectError: they are not valid JSON.
    """
    with readable(url, "is not valid JSON"):
        return json.loads(data)


def check_content(store: "ObjectStore", name: str, size: int) -> None:
    """Check an object without a known digest by reading it, if its suffix tells its format.

    Args:
        store: the object's store.
        name: the object's name.
        size: its size in bytes.

    Raises:
        DamagedObjectError: the object is not readable in this format.
        ObjectMissingError: the object no longer exists.
    """
    url, kind = store.join(name), name.rpartition(".")[2]
    if kind == "json":
        parse_json(url, store.read(name))
    elif kind == "parquet":
        with tempfile.TemporaryDirectory(prefix="starling-verify-") as folder:
            path = store.fetch(name, Path(folder))
            with readable(url), open_parquet(path) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group, use_threads=False)
    elif kind == "safetensors":
        with readable(url):
            length = int.from_bytes(store.read(name, 0, 8), "little")
            header = json.loads(store.read(name, 8, 8 + min(length, size)))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            if 8 + length + max(ends, default=0) != size:
                raise ValueError(f"{size} bytes, its header announces {8 + length + max(ends, default=0)}")


def open_parquet(path: Path) -> "ParquetFile":
    """Open a local Parquet file; verifies page checksums if it has them (ours do)."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True)


def object_sha256(store: "ObjectStore", name: str, size: int) -> str:
    """SHA-256 of an object in hex, read in pieces.

    Raises:
        ObjectMissingError: the object does not exist.
    """
    if size <= _CHUNK:
        return hashlib.sha256(store.read(name)).hexdigest()
    digest = hashlib.sha256()
    for start in range(0, size, _CHUNK):
        digest.update(store.read(name, start, min(size, start + _CHUNK)))
    return digest.hexdigest()
