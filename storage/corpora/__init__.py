"""Corpus readers, one per public layout; all yield `Utterance`s lazily.

    for utterance in open_corpus("librispeech", "LibriSpeech/train-clean-5"):
        ...

To add a layout, add a module and a line in `READERS`; the tests of all layouts read the reader's `EXAMPLE`.
"""

import difflib
from importlib import import_module
from pathlib import Path

from storage.corpora.base import CorpusError, CorpusReader, RejectedEntry, Utterance

__all__ = [
    "READERS",
    "CorpusError",
    "CorpusReader",
    "RejectedEntry",
    "Utterance",
    "guess_kind",
    "open_corpus",
    "reader_class",
]

_PACKED = frozenset((".zip", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"))
"""Suffixes of archives and compressed files that no reader takes as they are, unless it has recognized one."""
READERS: dict[str, str] = {
    "kaldi": "storage.corpora.kaldi:KaldiReader",
    "lhotse": "storage.corpora.lhotse:LhotseReader",
    "nemo": "storage.corpora.nemo:NemoReader",
    "peoples_speech": "storage.corpora.peoples_speech:PeoplesSpeechReader",
    "gigaspeech": "storage.corpora.gigaspeech:GigaSpeechReader",
    "huggingface": "storage.corpora.huggingface:HuggingFaceReader",
    "ljspeech": "storage.corpora.ljspeech:LJSpeechReader",
    "table": "storage.corpora.table:TableReader",
    "commonvoice": "storage.corpora.commonvoice:CommonVoiceReader",
    "speechocean762": "storage.corpora.presets:SpeechOceanReader",
    "tedlium": "storage.corpora.tedlium:TedliumReader",
    "an4": "storage.corpora.an4:An4Reader",
    "mls": "storage.corpora.mls:MlsReader",
    "fsdd": "storage.corpora.presets:FsddReader",
    "webdataset": "storage.corpora.webdataset:WebDatasetReader",
    "librispeech": "storage.corpora.librispeech:LibriSpeechReader",
    "telephone": "storage.corpora.presets:TelephoneReader",
    "switchboard": "storage.corpora.switchboard:SwitchboardReader",
    "hub5": "storage.corpora.switchboard:Hub5Reader",
    "sidecar": "storage.corpora.sidecar:SidecarReader",
}
"""Readers by kind, in the order in which they are tried for "auto", from the surest sign to the weakest: a manifest
may lie beside tars, a table beside folders of audio."""


def reader_class(kind: str) -> type[CorpusReader]:
    """The reader class of a kind.

    Raises:
        CorpusError: the kind is unknown; the message suggests the most similar one.
    """
    if kind not in READERS:
        near = difflib.get_close_matches(kind.lower(), READERS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CorpusError(f"unknown corpus kind {kind!r}: {hint}Known kinds: {', '.join(sorted(READERS))}, or 'auto'.")
    module, _, name = READERS[kind].partition(":")
    reader: type[CorpusReader] = getattr(import_module(module), name)
    return reader


def open_corpus(kind: str, path: str, **options: object) -> CorpusReader:
    """Open a corpus.

    Args:
        kind: a key of `READERS`, or "auto" to detect it from the files.
        path: folder or file of the corpus.
        **options: `corpus`, `domain`, `language`, and the options of the reader (see its class).

    Raises:
        CorpusError: an unknown kind, an option that the reader does not have, or a path that does not exist.
    """
    return reader_class(guess_kind(path) if kind == "auto" else kind)(path, **options)  # type: ignore[arg-type]


def guess_kind(path: str) -> str:
    """Detect the kind of the corpus at a path from its files.

    Raises:
        CorpusError: the path does not exist, or no layout matches.
    """
    root = Path(path).expanduser()
    trouble = ""
    for kind in READERS:
        try:
            if reader_class(kind).recognises(root):
                return kind
        except OSError as error:  # for example a folder without permission to list it
            trouble = trouble or f"{error.filename or root} cannot be read ({error.strerror or error})"
            continue
    if trouble:
        raise CorpusError(trouble)
    if not root.exists():
        raise CorpusError(f"{root} does not exist: check the path of the corpus")
    if root.suffix.lower() in _PACKED:
        raise CorpusError(
            f"{root} is an archive or compressed: unpack it, and name the folder or file that it contains"
        )
    raise CorpusError(
        f"{root} has no known corpus layout: there is no metadata.csv, no NAME.txt beside each NAME.wav, no wav.scp, "
        f"*.trans.txt, stm, … Name the kind ({', '.join(sorted(READERS))}), or describe the corpus in a CSV table."
    )
