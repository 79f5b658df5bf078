"""ARPA files: the text format of back-off models that every toolkit reads. `.gz` files are compressed.

    \\data\\
    ngram 1=4
    ngram 2=2

    \\1-grams:
    -99<tab><s><tab>-0.30103
    -0.90309<tab></s>
    -2<tab><unk>
    -0.60206<tab>word<tab>-0.17609

    \\2-grams:
    -0.30103<tab><s> word
    -0.47712<tab>word </s>

    \\end\\

A line has log10 p, the words, and the log10 of the back-off weight unless no longer n-gram begins with them.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from configurable.files import replacing
from configurable.lazy import pyarrow as pa
from configurable.lazy import pyarrow_compute as pc
from speech.lm.base import LmError
from speech.lm.ngram import LOWEST, NgramModel, NgramTables, longest_suffixes, states_of
from speech.lm.vocabulary import UNKNOWN, UNKNOWN_ID, Vocabulary

_BATCH = 1 << 18  # lines that are parsed at once: some ten megabytes
_UNKNOWN_LOG_PROB = -100.0  # KenLM's for a model without <unk>
_Batch = tuple[Any, NDArray[np.float32], NDArray[np.float32]]
_COUNT = re.compile(r"ngram\s+(\d+)\s*=\s*(\d+)")


def write_arpa(model: NgramModel, path: Path) -> None:
    """Writes a model, atomically."""
    with replacing(path, sync=True) as raw:
        if path.suffix == ".gz":
            # Without a name and a time in it, equal models give equal files.
            with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
                _write(model, packed)
        else:
            _write(model, raw)


class _Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


def _write(model: NgramModel, file: _Sink) -> None:
    counts = "".join(f"ngram {n}={count}\n" for n, count in enumerate(model.tables.counts, 1))
    file.write(f"\\data\\\n{counts}".encode())
    words = pa.array(list(model.words), pa.large_string())
    prefixes = words  # all n-grams one order lower, as text
    for n in range(1, model.order + 1):
        file.write(f"\n\\{n}-grams:\n".encode())
        first, last = model.tables.bounds(n)
        parts = []
        for start in range(first, last, _BATCH):
            at = slice(start, min(start + _BATCH, last))
            text = _ngrams(model, n, at, prefixes, words)
            file.write(_lines(model, n, at, text))
            if n < model.order:
                parts.append(text)
        prefixes = pa.chunked_array(parts, pa.large_string()).combine_chunks()
    file.write(b"\n\\end\\\n")


def _ngrams(model: NgramModel, order: int, at: slice, prefixes: Any, words: Any) -> Any:
    """Some n-grams as text."""
    states, last_words = np.divmod(model.tables.keys[at], len(model.words))
    text = words.take(pa.array(last_words))
    if order == 1:
        return text
    places = states - 1 - model.tables.bounds(order - 1)[0]
    return _joined(prefixes.take(pa.array(places)), text, separator=" ")


def _lines(model: NgramModel, order: int, at: slice, ngrams: Any) -> memoryview:
    fields = [_numbers(model.tables.log_probs[at]), ngrams]
    if order < model.order:
        fields.append(_numbers(model.tables.backoffs[at]))
    lines = _joined(_joined(*fields, separator="\t"), pa.scalar("", pa.large_string()), separator="\n")
    size = np.frombuffer(lines.buffers()[1], np.int64)[len(lines)]
    return memoryview(lines.buffers()[2])[:size]


def _joined(*columns: Any, separator: str) -> Any:
    return pc.binary_join_element_wise(*columns, pa.scalar(separator, pa.large_string()))


def _numbers(values: NDArray[np.float32]) -> Any:
    """Numbers with as many digits as float32 has; no "-0"."""
    return pc.cast(pa.array(values + np.float32(0)), pa.large_string())


def read_arpa(path: Path | str) -> NgramModel:
    """Reads a model.

    Raises:
        LmError: The file cannot be read, is no ARPA file, is cut off, or contradicts itself.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _Reader(path, file).model()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LmError(
            f"{path}: the language model cannot be read: {error}; write it again, or copy it again"
        ) from error


class _Reader:
    """Reads one file, section by section."""

    def __init__(self, path: Path, file: Iterable[bytes]) -> None:
        self.path, self.file, self.number = path, iter(file), 0

    def model(self) -> NgramModel:
        counts = self._header()
        words, log_probs, backoffs = self._unigrams(counts[0])
        builder = _Builder(self, words, log_probs, backoffs)
        texts = pa.array(list(words), pa.large_string())
        for order, count in enumerate(counts[1:], 2):
            self._expect(f"\\{order}-grams:")
            builder.add(order, *self._section(order, count, texts))
        self._expect("\\end\\")
        return builder.model()

    def fail(self, message: str) -> LmError:
        return LmError(f"{self.path}, line {self.number}: {message}; write the model again, or copy it again")

    def _lines(self) -> Iterator[str]:
        for raw in self.file:
            self.number += 1
            yield raw.decode().strip("\r\n")

    def _next(self) -> str:
        """The next line that is not empty."""
        for line in self._lines():
            if line.strip():
                return line.strip()
        raise self.fail("the file ends too early")

    def _expect(self, wanted: str) -> None:
        if (line := self._next()) != wanted:
            raise self.fail(f"{wanted} was expected, not {line[:60]!r}")

    def _header(self) -> list[int]:
        if not any(line.strip() == "\\data\\" for line in islice(self._lines(), 1000)):
            raise self.fail("no \\data\\ at the beginning: this is no ARPA file")
        counts: list[int] = []
        while (line := self._next()) != "\\1-grams:":
            match = _COUNT.fullmatch(line)
            if match is None or int(match[1]) != len(counts) + 1:
                raise self.fail(f"'ngram {len(counts) + 1}=…' or \\1-grams: was expected, not {line[:60]!r}")
            counts.append(int(match[2]))
        if not counts or not counts[0]:
            raise self.fail("the model has no unigrams")
        return counts

    def _unigrams(self, count: int) -> tuple[Vocabulary, NDArray[np.float32], NDArray[np.float32]]:
        texts, log_probs, backoffs = self._joined(self._batches(1, count))
        listed = [word for columns in texts for word in columns[0].to_pylist()]
        if len(set(listed)) != count:
            raise self.fail("a word comes twice among the unigrams, perhaps with composed and with decomposed letters")
        words = Vocabulary(listed)
        places = words.indices(listed)
        all_log_probs, all_backoffs = np.full(len(words), LOWEST, np.float32), np.zeros(len(words), np.float32)
        all_log_probs[words.index(UNKNOWN)] = _UNKNOWN_LOG_PROB
        all_log_probs[places], all_backoffs[places] = log_probs, backoffs
        return words, all_log_probs, all_backoffs

    def _section(
        self, order: int, count: int, words: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Words, log10 p and back-off weights of the n-grams of an order; `words` is an Arrow array."""
        numbered = (
            (_numbers_of(columns, words), log_probs, backoffs)
            for columns, log_probs, backoffs in self._batches(order, count)
        )
        ids, log_probs, backoffs = self._joined(numbered)
        return np.concatenate([np.zeros((0, order), dtype=np.int32), *ids]), log_probs, backoffs

    def _joined(self, batches: Iterable[_Batch]) -> tuple[list[Any], NDArray[np.float32], NDArray[np.float32]]:
        """The batches' words one after the other, and their log10 p and back-off weights in one array each."""
        parts = list(batches)
        empty = np.zeros(0, dtype=np.float32)
        log_probs = np.concatenate([empty, *(batch[1] for batch in parts)])
        return [batch[0] for batch in parts], log_probs, np.concatenate([empty, *(batch[2] for batch in parts)])

    def _batches(self, order: int, count: int) -> Iterator[_Batch]:
        """Columns of words, log10 p, and back-off weights, 0 where there are none."""
        for first in range(0, count, _BATCH):
            fields, lengths = self._batch(order, min(_BATCH, count - first), f"{order}-grams {first + 1} to {count}")
            starts = np.cumsum(lengths) - lengths
            columns = [fields.take(pa.array(starts + place)) for place in range(1, order + 1)]
            backoffs = np.zeros(len(lengths), dtype=np.float32)
            present = lengths == order + 2
            backoffs[present] = self._floats(fields.take(pa.array(starts[present] + order + 1)))
            yield columns, self._floats(fields.take(pa.array(starts))), backoffs

    def _batch(self, order: int, count: int, wanted: str) -> tuple[Any, NDArray[np.int64]]:
        """The fields of the next lines, one after the other, and how many each line has."""
        lines = list(islice(self.file, count))
        try:
            texts = pc.cast(pa.array(lines, pa.large_binary()), pa.large_string())
        except pa.ArrowInvalid as error:
            raise self.fail(f"the text after it is not UTF-8: {error}") from error
        if not pc.all(pc.string_is_ascii(texts)).as_py():
            # as normalized texts are; pyarrow's own utf8_normalize changes nothing
            texts = pa.array([normalize("NFC", text) for text in texts.to_pylist()], pa.large_string())
        fields = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(texts))
        lengths = pc.list_value_length(fields).to_numpy(zero_copy_only=False).astype(np.int64)
        wrong = np.flatnonzero((lengths != order + 1) & (lengths != order + 2))
        if len(wrong) or len(lines) < count:
            self.number += int(wrong[0]) + 1 if len(wrong) else len(lines)
            raise self.fail(f"{wanted} were expected, each with log10 p, {order} words, and perhaps a back-off weight")
        self.number += count
        return fields.flatten(), lengths

    def _floats(self, texts: Any) -> NDArray[np.float32]:
        try:
            values: NDArray[np.float64] = pc.cast(texts, pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            raise self.fail(f"in the {len(texts)} lines before: {error}") from error
        if np.isnan(values).any() or np.isposinf(values).any():
            raise self.fail(f"in the {len(texts)} lines before: a number is not finite")
        return np.maximum(values, LOWEST).astype(np.float32)


def _numbers_of(columns: list[Any], words: Any) -> NDArray[np.int32]:
    """The numbers of words, `[n-grams, order]`; of <unk> for those that have no unigram."""
    known = (pc.fill_null(pc.index_in(column, value_set=words), UNKNOWN_ID) for column in columns)
    return np.stack([column.to_numpy(zero_copy_only=False).astype(np.int32) for column in known], axis=1)


class _Builder:
    """Puts the sorted arrays of a model together, from the unigrams up."""

    def __init__(
        self, reader: _Reader, words: Vocabulary, log_probs: NDArray[np.float32], backoffs: NDArray[np.float32]
    ) -> None:
        self.reader, self.words, self.width = reader, words, len(words)
        self.counts = [self.width]
        self.keys = [np.arange(self.width, dtype=np.int64)]
        self.log_probs, self.backoffs = [log_probs], [backoffs]
        self.links = [np.zeros(self.width, dtype=np.int32)]

    def add(
        self, order: int, ids: NDArray[np.int32], log_probs: NDArray[np.float32], backoffs: NDArray[np.float32]
    ) -> None:
        """Adds the n-grams of the next order."""
        states = states_of(self.keys, ids[:, :-1], self.width)
        if (states < 0).any():
            missing = ids[int(np.flatnonzero(states < 0)[0])]
            text = " ".join(self.words[int(word)] for word in missing)
            raise self.reader.fail(f"the {order}-gram {text!r} has no {order - 1}-gram as its context")
        keys = states * self.width + ids[:, -1]
        by_key = np.argsort(keys, kind="stable")
        if (np.diff(keys[by_key]) == 0).any():
            raise self.reader.fail(f"a {order}-gram comes twice")
        links = longest_suffixes(self.keys, ids, self.width)
        self.counts.append(len(ids))
        self.keys.append(keys[by_key])
        self.log_probs.append(log_probs[by_key])
        self.backoffs.append(backoffs[by_key])
        self.links.append(links[by_key].astype(np.int32))

    def model(self) -> NgramModel:
        backoffs = np.concatenate([np.zeros(0, np.float32), *self.backoffs[:-1]])
        log_probs = np.concatenate(self.log_probs)
        tables = NgramTables(
            tuple(self.counts), np.concatenate(self.keys), log_probs, backoffs, np.concatenate(self.links)
        )
        return NgramModel(self.words, tables)
