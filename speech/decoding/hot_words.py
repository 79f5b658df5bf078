"""Hot words: phrases that an application expects, such as names, whose score every search raises.

The score of a text is raised by `score` for each letter of each occurrence of a phrase in it, as whole words; of
overlapping phrases, each counts. So the result does not depend on how a text is cut into tokens, and all searches rank
texts alike.

A search must not wait for the end of a phrase, or its beginning is lost before (Zhao et al. 2019, "Shallow-Fusion
End-to-End Contextual Biasing"). So each letter is paid in advance, and taken back when the text goes on otherwise: an
automaton of all phrases (Aho and Corasick 1975) knows after each letter what has been paid. What a finished text gets
in total is exact.
"""

from __future__ import annotations

import logging
import math
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from typing_extensions import override

from configurable.configuration import Configuration
from speech.decoding.base import DecodeConfig
from speech.hypotheses import DecodeError
from speech.scripts import is_unspaced
from speech.tokens import TokenError

if TYPE_CHECKING:
    from speech.tokens import Tokenizer

log = logging.getLogger(__name__)
Form = Literal["normalized", "words", "written"]
_OTHER, _BOUNDARY = 0, 1
"""Classes of bytes: those in no phrase, and those between words."""
_KEPT = ("Mn", "Mc", "Me", "Cs")
"""Categories of what belongs to letters: marks, and parts of letters (of units that begin or end inside one)."""
_MOST_ENTRIES = 1 << 26
"""Of an automaton's table, 256 MiB: some hundred thousand phrases."""
_MOST_BYTES = 1 << 24
"""Of a file with hot words."""
_ROWS = 64
"""Places in phrases whose continuations by all tokens are kept: 40 MB with Whisper's tokens."""
_SHOWN = 5
HOT_WORDS_FILE = {"hot_words.file": "hot-words"}
"""Part of a search's `file_fields`."""


class HotPhrase(NamedTuple):
    """A phrase, and what its occurrences are worth."""

    text: str
    score: float
    """Added for each letter."""

    @property
    def letters(self) -> int:
        """Number of its characters, without spaces."""
        return len(self.text.replace(" ", ""))

    @property
    def worth(self) -> float:
        """What an occurrence adds to a text's score."""
        return self.score * self.letters


class HotWordsConfig(Configuration):
    """Phrases that are expected, and how much that raises their score."""

    file: str = ""
    """A text file with a phrase on each line, as people write it. After a tab, a line may have a score of its own."""
    phrases: tuple[str, ...] = ()
    """Further phrases, in the form of the file's lines."""
    score: float = Field(default=0.5, ge=0, le=1000)
    """Added to the natural log probability of a text for each letter of each phrase in it."""

    @field_validator("phrases")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            _phrase(line, 0.0, "phrases")
        return value

    def read(self) -> list[HotPhrase]:
        """All phrases, each once, with single spaces; the highest score counts of one that is listed again.

        Raises:
            DecodeError: The file cannot be read, or a line has a score that is no number, or is negative.
        """
        lines = [(line, "phrases") for line in self.phrases]
        lines += [(line, f"{self.file}, line {number}") for number, line in enumerate(self._lines(), 1)]
        scores: dict[str, float] = {}
        for line, place in lines:
            text, score = _phrase(line, self.score, place)
            if text:
                scores[text] = max(score, scores.get(text, 0.0))
        return [HotPhrase(text, score) for text, score in scores.items()]

    def _lines(self) -> list[str]:
        if not self.file:
            return []
        try:
            if (size := Path(self.file).stat().st_size) > _MOST_BYTES:
                raise DecodeError(f"the hot words {self.file} have {size} bytes, more than {_MOST_BYTES}: give fewer")
            return Path(self.file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DecodeError(
                f"the hot words {self.file} cannot be read ({error}): give a text file in UTF-8, a phrase on each line"
            ) from error

    def normalized(self, normalize: Callable[[str], str]) -> Self:
        """These phrases in the form of the texts that are searched, without a file.

        Args:
            normalize: Gives a phrase this form. One of which nothing is left is left out with a warning.

        Raises:
            DecodeError: The phrases cannot be read.
        """
        phrases = self.read()
        texts = [" ".join(normalize(phrase.text).split()) for phrase in phrases]
        lost = [phrase.text for phrase, text in zip(phrases, texts, strict=True) if not text]
        _warn(lost, len(phrases), "have no words in the form of the transcripts")
        lines = [f"{text}\t{phrase.score!r}" for phrase, text in zip(phrases, texts, strict=True) if text]
        return self.model_copy(update={"file": "", "phrases": tuple(lines)})


class BiasedConfig(DecodeConfig):
    """Base class of configurations of searches, all of which can be given hot words."""

    hot_words: HotWordsConfig = HotWordsConfig()
    """Phrases whose score is raised."""

    file_fields: ClassVar[dict[str, str]] = HOT_WORDS_FILE

    @override
    def with_hot_words(self, file: str, score: float | None = None) -> Self:
        given = HotWordsConfig(file=file) if score is None else HotWordsConfig(file=file, score=score)
        return self.model_copy(update={"hot_words": given})

    @override
    def with_normalized_phrases(self, normalize: Callable[[str], str]) -> Self:
        given = self.hot_words
        if not (given.file or given.phrases):
            return self
        return self.model_copy(update={"hot_words": given.normalized(normalize)})


def _phrase(line: str, score: float, place: str) -> HotPhrase:
    """The phrase of a line; empty of an empty one."""
    text, tab, own = line.partition("\t")
    if tab and own.strip():
        try:
            score = float(own)
        except ValueError:
            score = math.nan
        if not 0 <= score <= 1000:
            raise DecodeError(
                f"{place}: {own.strip()[:40]!r} is not the score of a hot word: after a tab, give a number from 0 to "
                "1000, or nothing"
            )
    return HotPhrase(" ".join(text.split()), score)


def _warn(phrases: Sequence[str], total: int, why: str) -> None:
    if phrases:
        shown = ", ".join(map(repr, phrases[:_SHOWN])) + (", …" if len(phrases) > _SHOWN else "")
        log.warning("%d of %d hot words are left out, since they %s: %s", len(phrases), total, why, shown)


def hot_tokens(cfg: HotWordsConfig, tokenizer: Tokenizer) -> HotWords | None:
    """The automaton for a search over tokens; None without phrases that the tokens can spell.

    Raises:
        DecodeError: The phrases cannot be read, or there are too many.
    """
    phrases = cfg.read()
    if not phrases:
        return None
    known, unknown = list[HotPhrase](), list[str]()
    for phrase in phrases:
        try:
            spelled = bool(tokenizer.encode(phrase.text)) and any(map(str.isalnum, phrase.text))
        except TokenError:
            spelled = False
        if spelled:
            known.append(phrase)
        else:
            unknown.append(phrase.text)
    _warn(unknown, len(phrases), "cannot be spelled in the model's tokens")
    return _automaton(known, tokenizer.pieces(), "written" if tokenizer.written else "normalized")


def hot_vocabulary(cfg: HotWordsConfig, words: Sequence[str]) -> HotWords | None:
    """The automaton for a search over words; None without phrases of words that can be recognized.

    Args:
        cfg: The phrases.
        words: What can be recognized, by label.

    Raises:
        DecodeError: The phrases cannot be read, or there are too many.
    """
    phrases = cfg.read()
    if not phrases:
        return None
    listed = set(words)
    known = [phrase for phrase in phrases if listed.issuperset(phrase.text.split())]
    unknown = [phrase.text for phrase in phrases if not listed.issuperset(phrase.text.split())]
    _warn(unknown, len(phrases), "have words that are not among those that can be recognized")
    return _automaton(known, [f" {word}".encode() for word in words], "words")


def _automaton(phrases: Sequence[HotPhrase], units: Sequence[bytes], form: Form) -> HotWords | None:
    worth = [phrase for phrase in phrases if phrase.worth]
    return HotWords(worth, units, form) if worth else None


class HotWords:
    """What each unit of a search adds to the score of a text, after what precedes it.

    A state is a number: the longest beginning of a phrase that the text ends in.

    Args:
        phrases: The phrases.
        units: What each unit adds to a text, UTF-8; spaces are between words.
        form: Of the texts. In `normalized` ones, writing systems without spaces have no words; `words` are sequences of
            words of any system; in `written` ones, capitals are small letters, and punctuation, but the apostrophe, is
            between words, as far as units are whole letters.

    Attributes:
        phrases: The phrases.
        start: State of an empty text.

    Raises:
        DecodeError: There are too many phrases.
    """

    def __init__(self, phrases: Sequence[HotPhrase], units: Sequence[bytes], form: Form = "normalized") -> None:
        self.phrases, self._given = list(phrases), (list(units), form)
        classes, worth = bytearray(256), _patterns(phrases, form)
        letters = sorted(set().union(*worth) - {ord(" ")})
        classes[ord(" ")] = _BOUNDARY
        for number, byte in enumerate(letters, _BOUNDARY + 1):
            classes[byte] = number
        table = bytes(classes)
        self._units = [(_bare(unit) if form == "written" else unit).translate(table) for unit in units]
        self._build(_trie({pattern.translate(table): value for pattern, value in worth.items()}), len(letters) + 2)
        self.start = int(self._next[0, _BOUNDARY])
        self.gains = lru_cache(maxsize=_ROWS)(self._gains)

    def __reduce__(self) -> tuple[Any, ...]:
        """What makes it again in another process."""
        return HotWords, (self.phrases, *self._given)

    def _build(self, trie: _Trie, classes: int) -> None:
        """Complete the trie to an automaton: what follows each state, what ends there, and what is paid there."""
        count = len(trie.children)
        if count * classes > _MOST_ENTRIES:
            raise DecodeError(f"{len(self.phrases)} hot words are too many: give a shorter list, or shorter phrases")
        self._next = np.zeros((count, classes), dtype=np.int32)
        self._worth, self._paid = np.array(trie.worth), np.array(trie.paid)
        suffix = np.zeros(count, dtype=np.int64)
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            if state:
                self._next[state] = self._next[suffix[state]]
                self._worth[state] += self._worth[suffix[state]]
                self._paid[state] = max(self._paid[state], self._paid[suffix[state]])
            for byte, child in trie.children[state].items():
                suffix[child] = self._next[state, byte] if state else 0
                self._next[state, byte] = child
                waiting.append(child)
        # several spaces and punctuation marks in a row are one boundary
        behind = self._next[:, _BOUNDARY].copy()
        self._next[behind, _BOUNDARY] = behind

    def step(self, state: int, unit: int) -> tuple[int, float]:
        """The state after another unit, and what that adds to the score."""
        at, added = state, 0.0
        for byte in self._units[unit]:
            after = self._next.item(at, byte)
            if after != at:
                added += self._worth.item(after)
            at = after
        return at, added + self._paid.item(at) - self._paid.item(state)

    def end(self, state: int) -> float:
        """What the end of a text adds: phrases that end there count, and unfinished ones are taken back."""
        after = self._next.item(state, _BOUNDARY)
        added: float = (self._worth.item(after) if after != state else 0.0) - self._paid.item(state)
        return added

    def bonus(self, units: Sequence[int]) -> float:
        """What a whole text's score is raised by."""
        state, total = self.start, 0.0
        for unit in units:
            state, added = self.step(state, unit)
            total += added
        return total + self.end(state)

    def _gains(self, state: int) -> NDArray[np.float64]:
        """What each unit adds after a state, and, last, what the end does, [units + 1]."""
        order, columns = self._columns
        places = np.full(len(order), state)
        added = np.full(len(order), -self._paid[state])
        for count, column in columns:
            before = places[:count]
            after = self._next[before, column]
            added[:count] += np.where(after != before, self._worth[after], 0.0)
            places[:count] = after
        gains = np.empty(len(order) + 1)
        gains[order] = added + self._paid[places]
        gains[-1] = self.end(state)
        return gains

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], list[tuple[int, NDArray[np.uint8]]]]:
        """The units, the longest first, and for each place in them how many are so long, and their bytes there."""
        order = sorted(range(len(self._units)), key=lambda unit: -len(self._units[unit]))
        units, count, columns = [self._units[unit] for unit in order], len(order), []
        for place in range(len(units[0]) if units else 0):
            while len(units[count - 1]) <= place:
                count -= 1
            columns.append((count, np.frombuffer(bytes(unit[place] for unit in units[:count]), dtype=np.uint8)))
        return np.array(order, dtype=np.int64), columns


def _bare(text: bytes) -> bytes:
    """Written text without what is not told apart: small letters, spaces for punctuation; parts of letters stay."""
    letters = text.decode("utf-8", "surrogateescape").replace("’", "'")
    return "".join(map(_bare_letter, letters)).encode("utf-8", "surrogateescape")


def _bare_letter(letter: str) -> str:
    kept = letter.isalnum() or letter == "'" or unicodedata.category(letter) in _KEPT
    return letter.lower() if kept else " "


def _patterns(phrases: Sequence[HotPhrase], form: Form) -> dict[bytes, float]:
    """What occurrences of phrases look like, and what they are worth.

    They are between boundaries, where their writing system has any.
    """
    worth: dict[bytes, float] = {}
    for phrase in phrases:
        edges = (phrase.text[0], phrase.text[-1])
        before, after = (b"" if form != "words" and is_unspaced(letter) else b" " for letter in edges)
        text = phrase.text.encode()
        pattern = before + b" ".join((_bare(text) if form == "written" else text).split()) + after
        worth[pattern] = max(phrase.worth, worth.get(pattern, 0.0))
    return worth


class _Trie(NamedTuple):
    """A trie of patterns, by node."""

    children: list[dict[int, int]]
    worth: list[float]
    """Of the patterns that end there."""
    paid: list[float]
    """In advance, of patterns that go on there."""


def _trie(patterns: Mapping[bytes, float]) -> _Trie:
    trie = _Trie([{}], [0.0], [0.0])
    for pattern, worth in patterns.items():
        node, seen, letters = 0, 0, len(pattern) - pattern.count(_BOUNDARY)
        for place, byte in enumerate(pattern, 1):
            seen += byte != _BOUNDARY
            if byte not in trie.children[node]:
                trie.children[node][byte] = len(trie.children)
                trie.children.append({})
                trie.worth.append(0.0)
                trie.paid.append(0.0)
            node = trie.children[node][byte]
            if place < len(pattern):
                trie.paid[node] = max(trie.paid[node], worth * seen / letters)
        trie.worth[node] += worth
    return trie
