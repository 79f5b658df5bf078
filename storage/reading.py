"""Reads payloads out of shards by position, and whole shards in order, trusting neither the disk nor the network.

The first use of a shard in a process copies it to the local disk if it is remote, and compares its size and SHA-256
with the index: WebDataset tars lose samples silently when they are cut or damaged.
"""

import hashlib
import os
import tarfile
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

from storage.backends import publish_file, sweep_temporary_files, temporary_file
from storage.index import ShardIndex, ShardRecord
from storage.objects import ObjectMissingError, ObjectStore
from storage.safety import UnsafeTarError, check_tar


class ShardError(ValueError):
    """A shard that is missing, damaged, or not the one that the index describes."""


class ShardReader:
    """Random access to the payloads of a set of shards.

    Safe to use from several threads; may be pickled, and each process verifies for itself.

    Args:
        store: the store that holds the shards.
        index: their index.
        cache_dir: where copies of remote shards are kept, as `<sha256>.tar`; may be shared by processes and runs.
            None makes a temporary folder that goes with the reader.
    """

    def __init__(self, store: ObjectStore, index: ShardIndex, cache_dir: Path | None = None) -> None:
        self.store = store
        self.index = index
        self.cache_dir = Path(cache_dir) if cache_dir is not None else None
        self._prepare()

    def _prepare(self) -> None:
        self._paths: dict[int, Path] = {}
        self._locks = [threading.Lock() for _ in self.index.shards]
        self._folder_lock = threading.Lock()
        self._folder = self.cache_dir
        self._shard_of = self.index.column("shard")
        self._offset_of = self.index.column("offset")
        self._length_of = self.index.column("length")

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "index": self.index, "cache_dir": self.cache_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __len__(self) -> int:
        return len(self.index)

    def payload(self, position: int) -> bytes:
        """The payload of the utterance in this row of the index.

        Raises:
            IndexError: there is no such row.
            ShardError: its shard is missing or damaged.
        """
        if not 0 <= position < len(self.index):
            raise IndexError(f"row {position} of an index of {len(self.index)} utterances")
        shard, length = int(self._shard_of[position]), int(self._length_of[position])
        path = self.shard_path(shard)
        # An open costs microseconds; a kept descriptor would have to survive forks, threads and 10,000 shards.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = _pread(descriptor, length, int(self._offset_of[position]))
        finally:
            os.close(descriptor)
        if len(data) != length:
            record = self.index.shards[shard]
            raise ShardError(
                f"{self._label(record)}: {path} became shorter while it was in use. Write the shard again."
            )
        return data

    def shard_path(self, shard: int) -> Path:
        """The local, verified file of a shard (position in `index.shards`).

        Raises:
            ShardError: it is missing, damaged, unsafe, or not the one of the index.
        """
        if not 0 <= shard < len(self._locks):
            raise IndexError(f"shard {shard} of an index of {len(self._locks)} shards")
        path = self._paths.get(shard)
        if path is None:
            with self._locks[shard]:  # others wait for the first user of a shard, and for nobody else
                path = self._paths.get(shard) or self._obtain(self.index.shards[shard])
                self._paths[shard] = path
        return path

    def _obtain(self, record: ShardRecord) -> Path:
        path = self.store.local_path(record.name)
        if path is None:
            return self._obtain_copy(record)
        problem = _problem(path, record)
        if problem:
            raise ShardError(f"{self._label(record)}: {problem}. Delete it with its part file and run its stage again.")
        return path

    def _obtain_copy(self, record: ShardRecord) -> Path:
        target = self._cache_folder() / f"{record.sha256}.tar"
        if target.exists() and not _problem(target, record):
            return target
        try:
            with temporary_file(target.parent) as (_, scratch):
                fetched = self.store.fetch_into(record.name, scratch)
                problem = _problem(fetched, record)
                if problem is None:
                    publish_file(fetched, target)
        except ObjectMissingError as error:
            raise ShardError(f"{self._label(record)}: it is missing. Run the stage that writes it again.") from error
        if problem:
            raise ShardError(f"{self._label(record)}: {problem}. Delete it with its part file and run its stage again.")
        return target

    def _cache_folder(self) -> Path:
        with self._folder_lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="starling-shards-"))
                weakref.finalize(self, rmtree, self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            sweep_temporary_files(self._folder)
            return self._folder

    def _label(self, record: ShardRecord) -> str:
        return f"shard {self.store.join(record.name)}"


def _pread(descriptor: int, length: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(descriptor, length, offset)
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _problem(path: Path, record: ShardRecord) -> str | None:
    """What is wrong with a shard's file, or None."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"it has {size} bytes instead of {record.bytes}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "it is missing"
    if digest != record.sha256:
        return "its SHA-256 differs from the index: it is damaged or another one"
    try:
        check_tar(path)
    except UnsafeTarError as error:
        return str(error)
    return None


def iter_members(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every member of a local tar, in order.

    Raises:
        UnsafeTarError: the tar is damaged, cut or unsafe; before the first member is given out.
    """
    check_tar(path)
    with tarfile.open(path, mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, content.read()
