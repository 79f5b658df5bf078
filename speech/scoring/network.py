"""Texts with alternatives as networks of words, as NIST's sclite reads them.

    i've { um / uh / @ } gone      either "um", or "uh", or nothing (@)
    { it is / it's { not / @ } }   alternatives may have several words, and alternatives of their own
    (uh) yes                       "uh" may be left out, if optional words are allowed

A network has an arc for each word and for each `@`, in the order of the text, so that an arc comes after its
predecessors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

NULL = "@"
"""The alternative without a word."""

START = -1
"""Stands for the predecessor of the first arcs."""

_TOKEN = re.compile(r"[{}]|[^\s{}]+")
_TOKEN_INSIDE = re.compile(r"[{}/]|[^\s{}/]+")
_TAG = re.compile(r"(?<!\\);.*")
_MOST_NESTED = 64


class MarkupError(ValueError):
    """A text whose alternatives cannot be read; the message names the place and the remedy."""


@dataclass(frozen=True)
class ScoringRules:
    """How texts are read and words compared.

    By default, a text is nothing but words that must be equal. sclite's options are named in parentheses.
    """

    alternatives: bool = False
    """Read `{ a / b / @ }` as alternatives (sclite always does)."""
    optional: bool = False
    """Words in parentheses may be left out (-D)."""
    fragments: bool = False
    """A fragment, which begins or ends with a hyphen, equals any word that continues it (-F)."""
    ignore_case: bool = False
    """Compare in lower case (without -s)."""

    def reads_marks(self, text: str) -> bool:
        """Whether a text may hold anything but words that must be equal."""
        return (
            (self.alternatives and any(mark in text for mark in ("{", "}", NULL)))
            or (self.optional and "(" in text)
            or (self.fragments and "-" in text)
        )

    def fold(self, text: str) -> str:
        """The text as it is compared: in lower case if case is ignored."""
        return text.lower() if self.ignore_case else text

    def equal(self, ref: Arc, hyp: Arc) -> bool:
        """Whether two words are equal; the missing word equals none."""
        if ref.null or hyp.null:
            return False
        if ref.spelling == hyp.spelling:
            return True
        if not self.fragments or not (ref.fragment or hyp.fragment):
            return False
        return _completes(hyp, ref) if _hyphenated(ref.spelling) else _completes(ref, hyp)


PLAIN = ScoringRules()
"""Words separated by white space, nothing else."""


@dataclass(frozen=True)
class Arc:
    """A word of a network, or the missing word `@`."""

    word: str
    """As written, with the parentheses of an optional word."""
    start: int
    """The node that it leaves."""
    end: int
    """The node that it reaches."""
    before: tuple[int, ...]
    """Arcs that reach `start`, in order, by index; START for the first node."""
    optional: bool = False
    """Whether the word may be left out."""

    @property
    def null(self) -> bool:
        """Whether this is the missing word."""
        return self.word == NULL

    @property
    def spelling(self) -> str:
        """The word without the parentheses of an optional word."""
        return self.word[1:-1] if self.optional else self.word

    @property
    def fragment(self) -> bool:
        """Whether the word is a fragment. sclite does not see a leading hyphen behind a parenthesis."""
        return _hyphenated(self.spelling) and (self.spelling.endswith("-") or not self.optional)


@dataclass(frozen=True)
class Network:
    """All readings of a text; every path from the first node to `end` is one."""

    arcs: tuple[Arc, ...]
    end: int
    """The last node; the first is 0."""
    last: tuple[int, ...]
    """Arcs that reach the last node, by index; START if there are none."""

    @property
    def linear(self) -> bool:
        """Whether there is only one reading and no optional word."""
        return all(not arc.null and not arc.optional and arc.start == k for k, arc in enumerate(self.arcs))


def without_tags(text: str) -> str:
    r"""The text without what NIST's formats may attach to a word: tags, and a final asterisk.

    `gone;tag1;tag2` and `gone*` are the word `gone`; a semicolon of the word is written as `\;`.
    """
    if not any(mark in text for mark in ";*\\"):
        return text
    return " ".join(_without_tag(token) for token in _tokens(text))


def _without_tag(token: str) -> str:
    word = _TAG.sub("", token).replace("\\", "")
    word = word[:-1] if len(word) > 1 and word.endswith("*") else word
    return word or token


def parse_network(text: str, rules: ScoringRules) -> Network:
    """Reads a text as a network.

    Raises:
        MarkupError: Braces do not match, or an alternative is empty.
    """
    return _Builder(text, rules).build()


@dataclass
class _Builder:
    text: str
    rules: ScoringRules
    arcs: list[Arc] = field(default_factory=list)
    nodes: int = 1
    depth: int = 0

    def build(self) -> Network:
        tokens = _tokens(self.text) if self.rules.alternatives else self.text.split()
        self.tokens, self.position = tokens, 0
        end = self._sequence(0, inside=False)
        into: dict[int, list[int]] = {0: [START]}
        for index, arc in enumerate(self.arcs):
            into.setdefault(arc.end, []).append(index)
        arcs = tuple(replace(arc, before=tuple(into[arc.start])) for arc in self.arcs)
        return Network(arcs, end, tuple(into[end]))

    def _node(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def _word(self, word: str, start: int, end: int) -> None:
        optional = self.rules.optional and word.startswith("(") and word.endswith(")") and len(word) > 1
        self.arcs.append(Arc(self.rules.fold(word), start, end, (), optional))

    def _sequence(self, node: int, inside: bool) -> int:
        """Adds words and alternatives up to the end of the text or of the alternative; returns the last node."""
        while self.position < len(self.tokens):
            item = self.tokens[self.position]
            if inside and item in "/}":
                break
            self.position += 1
            if self.rules.alternatives and item == "{":
                node = self._alternatives(node)
            elif self.rules.alternatives and item == "}":
                raise MarkupError(
                    f"'}}' without '{{' in {self.text[:80]!r}: remove it, or use --words (marks are words)"
                )
            else:
                end = self._node()
                self._word(item, node, end)
                node = end
        return node

    def _alternatives(self, start: int) -> int:
        self.depth += 1
        if self.depth > _MOST_NESTED:
            raise MarkupError(
                f"alternatives are nested more than {_MOST_NESTED} deep in {self.text[:80]!r}: write fewer, or use "
                "--words (marks are words)"
            )
        ends = []
        while True:
            first = len(self.arcs)
            ends.append(self._sequence(start, inside=True))
            if len(self.arcs) == first:
                raise MarkupError(f"an alternative in {self.text[:80]!r} is empty: write @ for no word, or use --words")
            if self.position == len(self.tokens):
                raise MarkupError(
                    f"'{{' without '}}' in {self.text[:80]!r}: close it, or use --words (marks are words)"
                )
            self.position += 1
            if self.tokens[self.position - 1] == "}":
                break
        self.depth -= 1
        end = self._node()
        self.arcs = [replace(arc, end=end) if arc.end in ends else arc for arc in self.arcs]
        return end


def _tokens(text: str) -> list[str]:
    """Words and braces; between braces, slashes are tokens, too."""
    tokens: list[str] = []
    depth = position = 0
    while match := (_TOKEN_INSIDE if depth else _TOKEN).search(text, position):
        tokens.append(match[0])
        depth = max(0, depth + {"{": 1, "}": -1}.get(match[0], 0))
        position = match.end()
    return tokens


def _hyphenated(word: str) -> bool:
    """Whether a word begins or ends with a hyphen, and is more than one."""
    return len(word) > 1 and (word.startswith("-") or word.endswith("-"))


def _completes(word: Arc, fragment: Arc) -> bool:
    """Whether a word ends with what follows a fragment's first hyphen, else begins with what precedes its last."""
    part = fragment.spelling
    if part.startswith("-"):
        return word.spelling.endswith(part[1:])
    return word.spelling.startswith(part[:-1])
