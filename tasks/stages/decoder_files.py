"""Files that a configuration names: needed from the start, and part of a stage's key; and those that stages make."""

import hashlib
import os
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from configurable.choices import ChoiceWithFiles
from configurable.files import known_sha256
from speech.decoding import DecodeConfig
from speech.features import AugmentConfig
from speech.features.augment.bank import Bank
from speech.lm import NetworkConfig
from storage.stages import StageOutput, digest_json
from tasks.config.decoding import uses_stage
from tasks.stages.base import Run, StageError, StageRecord
from tasks.stages.process_cache import cached_once

_ANY_RATE = 16000
Named = TypeVar("Named", bound=ChoiceWithFiles)


def decoder_of(run: Run) -> DecodeConfig:
    """The run's decoding parameters, with paths on this machine for all files.

    Files that the configuration does not name come from the stage `lm` or `graph`; tuned values, once the decode stage
    has chosen them, take the place of configured ones.
    """
    return with_stage_files(tuned_decoder(run), stage_files(run))


def with_stage_files(cfg: DecodeConfig, source: Mapping[str, Any] | None) -> DecodeConfig:
    """Decoding parameters with verified local copies of a stage's files, unless they name files of their own.

    Args:
        cfg: The parameters.
        source: What `stage_files` returned; None for decoders that take no files of a stage.

    Raises:
        DamagedObjectError: A file is missing or damaged.
    """
    return cfg.completed(local_files(**source)) if source else cfg


def tuned_decoder(run: Run) -> DecodeConfig:
    """The run's decoding parameters with the values that the decode stage has chosen, without files of stages."""
    tuning = run.result("decode").record.get("tuning", {}) if "decode" in run.results else {}
    return run.config.decoder.model_copy(update=tuning.get("chosen", {}))


def stage_files(run: Run) -> dict[str, Any] | None:
    """Arguments of `local_files` for a decoder that takes files of the stages `lm`, `rescoring` or `graph`, or None."""
    decode, sources = run.config.decoder, []
    rescored = run.config.rescoring is not None or "rescore_lm" in decode.files()
    if decode.makes_graph:
        sources.append(graph_files(run))
        if rescored and uses_stage(decode, run.config.lm):
            sources.append(_files_of(run, "lm", ("lm",), "graph_lm"))
    elif isinstance(run.config.lm, NetworkConfig):
        if uses_stage(decode, run.config.lm):
            sources.append(_files_of(run, "lm", ("network",), "lm"))
    elif uses_stage(decode, run.config.lm):
        sources.append(_files_of(run, "lm", decode.file_fields))
    if run.config.rescoring is not None:
        sources.append(rescoring_files(run))
    return {**sources[0], "also": sources[1:]} if sources else None


def graph_files(run: Run) -> dict[str, Any]:
    """Arguments of `local_files` for the decoding graph and its words."""
    return _files_of(run, "graph", ("graph", "words"))


def rescoring_files(run: Run) -> dict[str, Any]:
    """Arguments of `local_files` for the second language model, which the stage `rescoring` made."""
    return _files_of(run, "rescoring", ("lm", "network"), "rescore_lm")


def _files_of(run: Run, stage: str, fields: Container[str], called: str = "") -> dict[str, Any]:
    """Arguments of `local_files` for some of a stage's files; `called` is the decoder's field if named differently."""
    made = run.result(stage)
    names = {called or field: name for field, name in made.record["files"].items() if field in fields}
    return {
        "url": made.url,
        "digest": digest_json([made.record["sha256"][name] for name in names.values()]),
        "names": names,
    }


def local_files(
    url: str, digest: str, names: Mapping[str, str], also: Sequence[Mapping[str, Any]] = ()
) -> dict[str, str]:
    """Paths of a stage's files on this machine, verified.

    Args:
        url: The stage's output.
        digest: Digest of the files.
        names: Their names in the output by field of the decoder.
        also: The same arguments for files of other stages.

    Returns:
        Paths by field.

    Raises:
        DamagedObjectError: One is missing or damaged.
    """
    kept = _folder(url, digest)
    output, folder = StageOutput.at(url), Path(kept.name)
    files = {field: str(output.fetch(name, folder)) for field, name in names.items()}
    for other in also:
        files |= local_files(**other)
    return files


@cached_once(maxsize=4)
def _folder(url: str, digest: str) -> "tempfile.TemporaryDirectory[str]":
    """A folder of this process for copies of an output's files; those on this machine are used where they are."""
    return tempfile.TemporaryDirectory(prefix="starling-lm-")


class FilesRecord(StageRecord):
    """What the record of a stage has whose files a decoder reads."""

    files: dict[str, str]
    """Names of the files by field of the decoder."""
    sha256: dict[str, str]
    """Of each file by name."""
    bytes: dict[str, int]
    """Of each file by name."""


class Published(TypedDict):
    """Digests and sizes of published files, by name."""

    sha256: dict[str, str]
    bytes: dict[str, int]


def publish_files(output: StageOutput, files: Iterable[Path]) -> Published:
    """Write files to a stage's output; returns the fields of its record that `stage_files` and model cards read."""
    paths = list(files)
    for path in paths:
        output.store.write_file(path.name, path)
    return {
        "sha256": {path.name: known_sha256(path) for path in paths},
        "bytes": {path.name: path.stat().st_size for path in paths},
    }


def with_digests(cfg: Named, section: str = "decode") -> Named:
    """The configuration with each file's SHA-256 in place of its path: what it says counts, not where it is.

    Args:
        cfg: The configuration.
        section: Its name in the pipeline's configuration.

    Raises:
        StageError: A file is not there.
    """
    check_files(cfg, section)
    return cfg.with_files(lambda path: known_sha256(Path(path)))


def check_files(cfg: ChoiceWithFiles, section: str = "decode") -> None:
    """See that the files are there.

    Raises:
        StageError: One is not; the message names the field.
    """
    for field, path in cfg.files().items():
        file_digest(path, f"{section}.{field}")


def check_decoder_files(cfg: DecodeConfig) -> None:
    """See that the files that decoding names are there, and that hot words can be read.

    Raises:
        StageError: A file is not there; the message names the field.
        DecodeError: Hot words cannot be read.
    """
    check_files(cfg)
    cfg.with_normalized_phrases(str)


def file_digest(path: str, field: str) -> str:
    """SHA-256 of a file that a field names.

    Raises:
        StageError: It is not there.
    """
    if not Path(path).is_file():
        raise StageError(f"{field} names {path}, which is not there: correct the path, or make the file")
    return known_sha256(Path(path))


def augment_digest(config: AugmentConfig) -> str:
    """SHA-256 of the names, sizes and modification times of all noises and impulse responses.

    Folders and tables include everything that they list, so a recording that is added, replaced or removed makes a new
    training. Paths are relative to their list, whose own location does not matter.

    Raises:
        BankError: If a list is missing or has no recordings.
    """
    digest = hashlib.sha256()
    for name in config.file_lists():
        for line in sorted(_recording_lines(Path(name).expanduser())):
            digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _recording_lines(path: Path) -> Iterator[str]:
    recordings = Bank([str(path)], _ANY_RATE).recordings
    for file in dict.fromkeys([path, *(recording.path for recording in recordings)]):
        if file.is_file():
            status = file.stat()
            yield f"{os.path.relpath(file, path)}\t{status.st_size}\t{status.st_mtime_ns}"
        elif file != path:
            yield f"{os.path.relpath(file, path)}\tmissing"
