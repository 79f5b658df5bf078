"""What is said of an object that is not what it should be: one sentence with its URL and what to do about it.

    with readable(store.join("sets.json")):
        sets = json.loads(data)["sets"]       # whatever is wrong with it becomes a `DamagedObjectError`

Libraries tell of a damaged file in ways of their own ("Received invalid number of bytes"), and never where it is.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
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
    """An object that cannot be what a stage wrote; the message names its URL and what to do."""


def remedy(url: str) -> str:
    """What to do about a missing or damaged object."""
    if found := _OUTPUT_URL.match(url):
        return (
            f"`starling storage verify --repair --url {found[1]}` takes it and its stage's record away; then run the "
            "pipeline again, which makes what is missing"
        )
    return "Delete it, a shard with its part file, and run again what writes it"


def damaged(url: str, reason: object) -> DamagedObjectError:
    """The error of an object."""
    text = str(reason) if isinstance(reason, str) or str(reason) else ""
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}" if text else type(reason).__name__
    return DamagedObjectError(f"{url} is damaged ({' '.join(text.split())[:300]}). {remedy(url)}.")


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Turns whatever the content of an object makes a library raise into an error that names it.

    Put as little as possible into the block: a mistake of our own in there would be taken for the object's.

    Raises:
        DamagedObjectError: something in the block could not read the object.
    """
    try:
        yield
    except DamagedObjectError:
        raise
    except _UNREADABLE as error:
        raise damaged(url, error) from error
    except OSError as error:
        # of Arrow's, about the content of a Parquet file; the system's and the store's have a number or a URL
        if type(error) is not OSError or error.errno not in (None, errno.EINVAL):
            raise
        raise damaged(url, error) from error


def parse_json(url: str, data: bytes) -> Any:
    """The value of a JSON object's bytes.

    Raises:
        DamagedObjectError: they are no JSON.
    """
    with readable(url):
        return json.loads(data)


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
