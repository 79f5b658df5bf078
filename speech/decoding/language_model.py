"""Language models for decoding: ARPA files (plain or gzip) and KenLM's binaries, read by KenLM (Heafield 2011).

KenLM is part of flashlight-text's wheel. It finds words by their place in a dictionary, which must therefore be filled
in the order of the search's own labels.
"""

from __future__ import annotations

import gzip
import io
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from speech.native_output import without_lines

_PROGRESS = (b"Loading the LM will be faster", b"Reading ", b"----5---10", b"****", b"The ARPA file is missing <unk>")
_HEADER_LINES = 100
_GZIP = b"\x1f\x8b"
_COUNT = re.compile(r"ngram\s+([0-9]{1,3})\s*=\s*([0-9]{1,18})")
_SHORTEST_LINE = 4
"""Bytes of an n-gram, at least: a probability, a tab, a word, the end of the line."""
_DEFLATED = 1032
"""What a byte of a packed file unpacks to, at most."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a packed file raises that is cut off or damaged."""
NOT_WORDS = frozenset(
    {"<s>", "</s>", "<S>", "</S>", "<unk>", "<UNK>", "<eps>", "<SIL>", "!SIL", "SIL", "<SPOKEN_NOISE>", "#0"}
)
"""Entries of word lists and language models that are never recognized."""


class LanguageModelError(ValueError):
    """A file is no language model that can be read."""


class LmState(Protocol):
    """What a language model knows of the words so far; two equal histories share one."""

    def child(self, label: int, /) -> LmState:
        """The state after another label."""
        ...


class LanguageModel(Protocol):
    """What flashlight-text's decoders ask of a language model; log10 probabilities."""

    def start(self, start_with_nothing: bool, /) -> LmState:
        """The state at the beginning of a sentence, or without any context."""
        ...

    def score(self, state: LmState, label: int, /) -> tuple[LmState, float]:
        """The state after another word, and the word's probability."""
        ...

    def finish(self, state: LmState, /) -> tuple[LmState, float]:
        """The end of the sentence, and its probability."""
        ...


def zero_lm() -> LanguageModel:
    """A language model to which everything is equally likely."""
    from flashlight.lib.text.decoder import ZeroLM

    model: LanguageModel = ZeroLM()
    return model


def load_lm(path: str, labels: Sequence[str]) -> LanguageModel:
    """Read a language model.

    Args:
        path: ARPA (also gzip) or KenLM binary; empty for a model without preferences.
        labels: The word or token of each label, 0 and up. One that the model lacks has the probability of its `<unk>`.

    Raises:
        LanguageModelError: There is no such file, or KenLM does not read it.
    """
    if not path:
        return zero_lm()
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    if not Path(path).is_file():
        raise LanguageModelError(f"there is no language model {path}: give an ARPA file or a KenLM binary")
    dictionary = Dictionary()
    for label in labels:
        dictionary.add_entry(label)
    if dictionary.index_size() != len(labels):
        raise LanguageModelError(f"{len(labels) - dictionary.index_size()} labels for {path} are listed twice")
    try:
        with _for_kenlm(Path(path)) as readable, without_lines(_PROGRESS):
            model: LanguageModel = KenLM(str(readable), dictionary)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise LanguageModelError(
            f"{path} is no language model that KenLM reads ({reason}): give an ARPA file or a KenLM binary"
        ) from error
    return model


@contextmanager
def _for_kenlm(path: Path) -> Iterator[Path]:
    """Provide a file that KenLM reads: it refuses unigram models.

    Of those, a copy is made as a bigram model with a single bigram, `<s> </s>`, whose probability is that of the
    unigram `</s>`. All probabilities are the same.
    """
    header: list[str] = []
    for line in _lines(path):
        header.append(line.strip())
        if line.startswith("\\1-grams:") or len(header) > _HEADER_LINES:
            break
    _check_counts(path, header)
    if not any(line.startswith("ngram 1=") for line in header) or any(line.startswith("ngram 2=") for line in header):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="starling-lm-") as folder:
        copy = Path(folder) / "bigram.arpa"
        copy.write_text("".join(_as_bigrams(_lines(path))), encoding="utf-8")
        yield copy


def _check_counts(path: Path, header: Sequence[str]) -> None:
    """Compare the counts of an ARPA file with its size: KenLM allocates what they claim."""
    lines = [line for line in header if line]
    if not lines or lines[0] != "\\data\\":
        return
    counts = [_COUNT.fullmatch(line) for line in lines[1:] if not line.startswith("\\")]
    numbers = [(int(one[1]), int(one[2])) for one in counts if one]
    with path.open("rb") as file:
        most = path.stat().st_size * (_DEFLATED if file.read(2) == _GZIP else 1) // _SHORTEST_LINE
    total = sum(count for _, count in numbers)
    if None in counts or [order for order, _ in numbers] != list(range(1, len(counts) + 1)):
        raise unreadable(path, "its header does not count the n-grams of each order")
    if total > most:
        raise unreadable(path, f"its header claims {total} n-grams, but there is room for {most}")


def _as_bigrams(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a unigram ARPA file as those of a bigram model."""
    end = "-99"
    for line in lines:
        fields = line.split()
        if len(fields) > 1 and fields[1] == "</s>":
            end = fields[0]
        if line.strip() == "\\end\\":
            yield f"\\2-grams:\n{end}\t<s> </s>\n\n"
        yield line
        if line.startswith("ngram 1="):
            yield "ngram 2=1\n"


def arpa_words(path: str) -> list[str]:
    """The words of an ARPA file, in its order, without those that are never recognized.

    Raises:
        LanguageModelError: It is no ARPA file.
    """
    found = [word for word in _unigrams(Path(path)) if word not in NOT_WORDS]
    if not found:
        raise LanguageModelError(
            f"{path} lists no words: it is no ARPA file. Name a list of words beside it (decode.words); a KenLM binary "
            "cannot be listed"
        )
    return found


def _unigrams(path: Path) -> Iterator[str]:
    inside = False
    lines = (line for line in _lines(path) if line.strip())
    if next(lines, "").strip() != "\\data\\":
        return
    for line in lines:
        if line.startswith("\\"):
            if inside:
                return
            inside = line.strip() == "\\1-grams:"
        elif inside and len(fields := line.split()) > 1:
            yield fields[1]


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == _GZIP
            with io.TextIOWrapper(gzip.open(file) if packed else file, "utf-8", errors="replace") as text:
                yield from text
    except (OSError, *DAMAGED) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception | str) -> LanguageModelError:
    """The error for a language model that cannot be read."""
    return LanguageModelError(f"the language model {path} cannot be read: {error}; write it again, or copy it again")


def read_words(path: str) -> list[str]:
    """The first column of a text file, each word once, without those that are never recognized.

    Args:
        path: A list of words, one a line, or a lexicon.

    Raises:
        LanguageModelError: It cannot be read, or it holds no words.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LanguageModelError(f"the list of words {path} cannot be read as UTF-8: {error}") from error
    words = dict.fromkeys(fields[0] for line in lines if (fields := line.split()))
    found = [word for word in words if word not in NOT_WORDS]
    if not found:
        raise LanguageModelError(f"{path} holds no words: give one a line")
    return found
