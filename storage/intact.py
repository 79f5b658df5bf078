"""What is said of an object that is not what it should be: one sentence with its URL and what to do about it.

    with readable(store.join("sets.json")):
        sets = json.loads(data)["sets"]       # any error becomes a `DamagedObjectError`

Libraries tell of a damaged file in ways of their own ("Received invalid number of bytes"), and never where it is.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

if TYPE_CHECKING:
    from storage.objects import ObjectStore

_OUTPUT_URL = re.compile(r"(.+?)/[a-z][a-z0-9_-]*/[0-9a-f]{16}(?:/|$)")
_CHUNK = 8 << 20
_UNREADABLE = (
    pa.ArrowException,
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
"""What is raised by reading bytes that are not what was written, and by taking apart what came of it."""


class DamagedObjectError(ValueError):
    """An object that cannot be what a stage wrote; the message names its URL and what to do.

    Attributes:
        reason: what is wrong, in a few words.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


def remedy(url: str) -> str:
    """What to do about a missing or damaged object."""
    if found := _OUTPUT_URL.match(url):
        return (
            f"`starling storage verify --repair --url {found[1]}` takes away what is damaged and its stage's record; "
            "then run the pipeline again, which makes just that again"
        )
    return "Delete it, a shard with its part file, and run again what writes it"


def damaged(url: str, reason: object, what: str = "is damaged") -> DamagedObjectError:
    """The error of an object."""
    text = " ".join(str(reason).split())[:300]
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}" if text else type(reason).__name__
    return DamagedObjectError(f"{url} {what} ({text}). {remedy(url)}.", f"it {what} ({text})")


@contextmanager
def readable(url: str, what: str = "is damaged") -> Iterator[None]:
    """Turns an error that a library raises over an object's content into one that names the object.

    Put as little as possible into the block: a mistake of our own in there would be taken for the object's.

    Args:
        url: the object's.
        what: what is said of it.

    Raises:
        DamagedObjectError: something in the block could not read the object.
    """
    try:
        yield
    except DamagedObjectError:
        raise
    except _UNREADABLE as error:
        raise damaged(url, error, what) from error
    except OSError as error:
        # Arrow's, about the content of a Parquet file, has no number; the system's has, and the store's names its URL
        if type(error) is not OSError or error.errno is not None:
            raise
        raise damaged(url, error, what) from error


def parse_json(url: str, data: bytes) -> Any:
    """The value of a JSON object's bytes.

    Raises:
        DamagedObjectError: they are no JSON.
    """
    with readable(url, "is not valid JSON"):
        return json.loads(data)


def check_content(store: "ObjectStore", name: str, size: int) -> None:
    """Reads an object of which no digest is known, if its suffix says what it should be.

    Args:
        store: where it is.
        name: its name.
        size: its bytes.

    Raises:
        DamagedObjectError: it cannot be read as that.
        ObjectMissingError: it is not there any more.
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
                raise ValueError(f"{size} bytes, its header speaks of {8 + length + max(ends, default=0)}")


def open_parquet(path: Path) -> pq.ParquetFile:
    """A local Parquet file, whose pages are compared with their checksums where it has some: ours do."""
    return pq.ParquetFile(path, page_checksum_verification=True)


def object_sha256(store: "ObjectStore", name: str, size: int) -> str:
    """SHA-256 of an object in hex, read in pieces.

    Raises:
        ObjectMissingError: it is not there, or not any more.
    """
    if size <= _CHUNK:
        return hashlib.sha256(store.read(name)).hexdigest()
    digest = hashlib.sha256()
    for start in range(0, size, _CHUNK):
        digest.update(store.read(name, start, min(size, start + _CHUNK)))
    return digest.hexdigest()
