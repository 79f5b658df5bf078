"""ARPA files (plain or gzip) and KenLM's binaries, read by KenLM (Heafield 2011) for decoding and scoring.

KenLM is part of flashlight-text's wheel. It finds words by their place in a dictionary, which must therefore be filled
in the order of the search's own labels.
"""

from __future__ import annotations

import gzip
import io
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from typing import Any, Protocol, TextIO
from unicodedata import is_normalized, normalize

from typing_extensions import override

from speech.lm.base import LanguageModel, LmError
from speech.lm.vocabulary import END_ID, Vocabulary
from speech.native_output import without_lines

_PROGRESS = (b"Loading the LM will be faster", b"Reading ", b"----5---10", b"****", b"The ARPA file is missing <unk>")
_HEADER_LINES = 100  # that are searched for the counts: comments may precede them, and there are at most a dozen
_BLANKS = " \t\r\n\v\f"
_SPACE = re.compile(f"[{_BLANKS}]+")
_COUNT = re.compile(r"ngram\s+(\d{1,9})\s*=\s*(\d{1,18})")
_LEAST = "-99"
"""log10 p that stands for a probability of 0."""
_GZIP = b"\x1f\x8b"
_SHORTEST_LINE = 4
"""Bytes of an n-gram, at least: a probability, a tab, a word, the end of the line."""
_DEFLATED = 1032
"""What a byte of a packed file unpacks to, at most: deflate's largest ratio (zlib's technical details)."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a packed file raises that is cut off or damaged."""
NOT_WORDS = frozenset(
    {"<s>", "</s>", "<S>", "</S>", "<unk>", "<UNK>", "<eps>", "<SIL>", "!SIL", "SIL", "<SPOKEN_NOISE>", "#0"}
)
"""Entries of word lists and language models that are never recognized."""


class LmState(Protocol):
    """What a language model knows of the words so far; two equal histories share one."""

    def child(self, label: int, /) -> LmState:
        """The state after another label."""
        ...


class FlashlightLm(Protocol):
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


def zero_lm() -> FlashlightLm:
    """A language model to which everything is equally likely."""
    from flashlight.lib.text.decoder import ZeroLM

    model: FlashlightLm = ZeroLM()
    return model


def load_lm(path: str, labels: Sequence[str]) -> FlashlightLm:
    """Read a language model.

    Args:
        path: ARPA (also gzip) or KenLM binary; empty for a model without preferences.
        labels: The word or token of each label, 0 and up. One that the model lacks has the probability of its `<unk>`.

    Raises:
        LmError: There is no such file, or KenLM does not read it.
    """
    if not path:
        return zero_lm()
    from flashlight.lib.text.dictionary import Dictionary

    if not Path(path).is_file():
        raise LmError(f"there is no language model {path}: give an ARPA file or a KenLM binary")
    dictionary = Dictionary()
    for label in labels:
        dictionary.add_entry(label)
    if dictionary.index_size() != len(labels):
        raise LmError(f"{len(labels) - dictionary.index_size()} labels for {path} are listed twice")
    try:
        with without_lines(_PROGRESS):
            return _kenlm(Path(path), dictionary)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise LmError(
            f"{path} is no language model that KenLM reads ({reason}): give an ARPA file or a KenLM binary"
        ) from error


def _kenlm(path: Path, dictionary: Any) -> FlashlightLm:
    """The model of a file, or of a copy that KenLM reads.

    KenLM refuses unigram models, and back-off weights at the highest order. Of a unigram model, a copy is made as a
    bigram model with a single bigram, `<s> </s>`, whose probability is that of the unigram `</s>`: all probabilities
    are the same.
    """
    from flashlight.lib.text.decoder.kenlm import KenLM

    model: FlashlightLm
    orders = len(_counted(path))
    if orders != 1 and (not orders or _is_composed(path)):
        try:
            model = KenLM(str(path), dictionary)
        except RuntimeError as error:
            if "should have no backoff" not in str(error):
                raise
        else:
            return model
    with arpa_copy(path, _as_bigrams if orders == 1 else iter) as copy:
        model = KenLM(str(copy), dictionary)
    return model


class KenlmModel(LanguageModel):
    """A model that KenLM queries.

    Args:
        path: An ARPA file or a binary file.
        words: The words that will be asked for: the library does not list those of the file.

    Raises:
        LmError: KenLM cannot read the file.
    """

    def __init__(self, path: Path | str, words: Iterable[str]) -> None:
        self.words = Vocabulary(words)
        self._model = load_lm(str(path), list(self.words))
        self.start = self._model.start(False)

    @override
    def score(self, state: Any, word: int) -> tuple[Any, float]:
        after, log_prob = self._model.finish(state) if word == END_ID else self._model.score(state, word)
        return after, float(log_prob)


@contextmanager
def arpa_copy(path: Path, change: Callable[[Iterable[str]], Iterator[str]] = iter) -> Iterator[Path]:
    """Provide a plain copy of an ARPA file that the strictest readers take; see `arpa_lines`.

    Args:
        path: The file, plain or gzip.
        change: Changes its lines.

    Raises:
        LmError: It is no ARPA file.
    """
    with tempfile.TemporaryDirectory(prefix="starling-lm-") as folder:
        copy = Path(folder) / "lm.arpa"
        with copy.open("w", encoding="utf-8") as file:
            file.writelines(change(arpa_lines(path)))
        yield copy


def arpa_lines(path: Path) -> Iterator[str]:
    """Yields the lines of an ARPA file, checked, in composed letters, and without what some readers refuse.

    That is text before the model, back-off weights at the highest order (nothing backs off from there), infinite
    numbers, and ends of lines as on Windows. kaldilm ends the process if it reads most of these, or a malformed line.

    Raises:
        LmError: The file cannot be read, or a line is not what the file's header announces.
    """
    counts: list[int] = []
    order, left, number, begun = -1, 0, 0, False  # before \data\, in the header, or in the section of an order
    for number, raw in enumerate(_lines(path), 1):
        line = raw.strip(_BLANKS)
        if not line or (order < 0 and line != "\\data\\"):
            continue
        if left:
            entry = _entry(path, number, line, order, order == len(counts))
            begun = begun or entry.split()[1] == "<s>"
            yield entry
            left -= 1
        elif order == 0 and (match := _COUNT.fullmatch(line)) and int(match[1]) == len(counts) + 1:
            counts.append(int(match[2]))
            yield f"{line}\n"
        else:
            order += 1
            mark = f"\\{order}-grams:" if 0 < order <= len(counts) else "\\end\\" if order else "\\data\\"
            if order == 2 and not begun:
                mark = "a 1-gram <s>, the beginning of a sentence,"
            if line != mark:
                raise _malformed(path, number, mark, line)
            yield f"\n{line}\n"
            if mark == "\\end\\":
                return
            left = counts[order - 1] if order else 0
    raise _malformed(path, number, "\\end\\" if order >= 0 else "\\data\\", "the end of the file")


def _entry(path: Path, number: int, line: str, order: int, highest: bool) -> str:
    """The line of an n-gram; without its back-off weight if no n-gram is longer."""
    log_prob, *words = _SPACE.split(line)
    weights = words[order:]
    try:
        values = [float(text) for text in (log_prob, *weights)]
    except ValueError:
        values = []
    if len(words) < order or len(weights) > 1 or not values or not all(value < inf for value in values):
        raise _malformed(path, number, f"log10 p, {order} words, and perhaps a back-off weight", line)
    numbers = [text if value > -inf else _LEAST for text, value in zip((log_prob, *weights), values, strict=True)]
    return "\t".join([numbers[0], " ".join(words[:order]), *([] if highest else numbers[1:])]) + "\n"


def _malformed(path: Path, number: int, wanted: str, line: str) -> LmError:
    return LmError(
        f"{path}, line {number}: {wanted} was expected, not {line[:60]!r}; write the model again, or copy it again"
    )


def _counted(path: Path) -> list[int]:
    """The number of n-grams of each order, as the header of an ARPA file says; empty for other files.

    Raises:
        LmError: The header is wrong, or claims more than the file has room for: KenLM would allocate that.
    """
    lines = filter(None, (line.strip(_BLANKS) for line in islice(_lines(path), _HEADER_LINES)))
    if "\\data\\" not in lines:  # otherwise the iterator is behind it
        return []
    matches = [_COUNT.fullmatch(line) for line in takewhile(lambda line: not line.startswith("\\"), lines)]
    counts = [int(match[2]) for order, match in enumerate(matches, 1) if match and int(match[1]) == order]
    if len(counts) < len(matches):
        raise unreadable(path, "its header does not count the n-grams of each order")
    with path.open("rb") as file:
        most = path.stat().st_size * (_DEFLATED if file.read(2) == _GZIP else 1) // _SHORTEST_LINE
    if sum(counts) > most:
        raise unreadable(path, f"its header claims {sum(counts)} n-grams, but there is room for {most}")
    return counts


def _is_composed(path: Path) -> bool:
    """Whether all letters of a file are composed (NFC)."""
    with _opened(path) as text:
        return all(is_normalized("NFC", "".join(lines)) for lines in iter(lambda: text.readlines(1 << 20), []))


def _as_bigrams(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a unigram ARPA file as those of a bigram model."""
    end = "-99"
    for line in lines:
        fields = line.split()
        if len(fields) > 1 and fields[1] == "</s>":
            end = fields[0]
        if line.strip() == "\\end\\":
            yield f"\n\\2-grams:\n{end}\t<s> </s>\n"
        yield line
        if _COUNT.fullmatch(line.strip()):
            yield "ngram 2=1\n"


def arpa_words(path: str, remedy: str = "name a list of words beside it (decode.words)") -> list[str]:
    """The words of an ARPA file, in its order, without those that are never recognized.

    Args:
        path: The file.
        remedy: What to do about a file that does not list its words.

    Raises:
        LmError: It is no ARPA file.
    """
    listed = [word for word in _unigrams(Path(path)) if word not in NOT_WORDS]
    if not listed:
        raise LmError(
            f"{path} lists no words, so it is no ARPA file (words of a KenLM binary cannot be listed): {remedy}"
        )
    return listed


def _unigrams(path: Path) -> Iterator[str]:
    inside = False
    lines = (line for line in _lines(path) if line.strip())
    if "\\data\\" not in (line.strip() for line in islice(lines, _HEADER_LINES)):  # otherwise `lines` is behind it
        return
    for line in lines:
        if line.startswith("\\"):
            if inside:
                return
            inside = line.strip() == "\\1-grams:"
        elif inside and len(fields := line.split()) > 1:
            yield fields[1]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == _GZIP
            with io.TextIOWrapper(gzip.open(file) if packed else file, "utf-8", errors="replace") as text:
                yield text
    except (OSError, *DAMAGED) as error:
        raise unreadable(path, error) from error


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file, plain or gzip, in composed letters."""
    with _opened(path) as text:
        for line in text:
            yield normalize("NFC", line)


def unreadable(path: Path, error: Exception | str) -> LmError:
    """The error for a language model that cannot be read."""
    return LmError(f"the language model {path} cannot be read: {error}; write it again, or copy it again")


def read_words(path: str) -> list[str]:
    """The first column of a text file, each word once, without those that are never recognized.

    Args:
        path: A list of words, one a line, or a lexicon.

    Raises:
        LmError: It cannot be read, or it holds no words.
    """
    try:
        lines = normalize("NFC", Path(path).read_text(encoding="utf-8-sig")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LmError(f"the list of words {path} cannot be read as UTF-8: {error}") from error
    words = dict.fromkeys(fields[0] for line in lines if (fields := line.split()))
    listed = [word for word in words if word not in NOT_WORDS]
    if not listed:
        raise LmError(f"{path} holds no words: give one a line")
    return listed
