"""Lexicon formats: Kaldi's lexicon.txt and lexiconp.txt, CMUdict, and dictionaries of the Montreal Forced Aligner.

| format | a line |
|---|---|
| `kaldi` | `word phone phone …` |
| `kaldip` | `word probability phone phone …` |
| `cmudict` | `word(2) PH ON E # comment`; `;;;` begins a line of comment |
| `mfa` | word, tab, optionally 1 or 4 numbers with tabs (the first is the probability), then phones |

    kaldi     READ R EH1 D
    kaldip    READ 0.35 R EH1 D
    cmudict   READ(2)  R IY1 D # present tense
    mfa       read<tab>0.35<tab>0.1<tab>1.2<tab>0.9<tab>R EH1 D

The numbers of `mfa` are the probability of the pronunciation, that of silence after it, and factors for silence and for
no silence before it; only the first one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unicodedata import normalize

from speech.lexicon.base import BadLine, LexiconError, Pronunciation

Format = Literal["kaldi", "kaldip", "cmudict", "mfa"]
_SAMPLE = 2000
"""Number of first lines from which the format is told: a CMUdict has alternatives among them, as READ(2)."""
_SHOWN = 60  # characters of a bad line in reports
_ALTERNATIVE = re.compile(r"(?P<word>.+)\((?P<number>[0-9]{1,2})\)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f]")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+([eE]-?[0-9]+)?")
_ARPABET = re.compile(r"[A-Z]{1,2}[0-2]?")


class _BadLineError(ValueError):
    """A line cannot be used; the message is the reason."""


@dataclass
class Parsed:
    """The contents of a lexicon file."""

    entries: dict[str, list[Pronunciation]] = field(default_factory=dict)
    """Pronunciations by word, repeated ones included."""
    bad: list[BadLine] = field(default_factory=list)
    """Lines that cannot be used."""
    lines: int = 0
    """Number of lines that are neither empty nor comments, bad ones included."""
    format: str = ""
    """Format that was assumed."""

    def duplicates(self) -> list[str]:
        """Words with a repeated pronunciation, once per repetition."""
        return [
            word
            for word, variants in self.entries.items()
            for _ in range(len(variants) - len({pronunciation.phones for pronunciation in variants}))
        ]


def read_lexicon(path: Path, format_: Format | Literal["auto"] = "auto") -> Parsed:
    """Read a lexicon.

    Args:
        path: A text file; lines that are not UTF-8 are bad lines.
        format_: Format of the file; `auto` detects it.

    Raises:
        LexiconError: The file cannot be read, or none of its lines can be used.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LexiconError(f"the lexicon {path} cannot be read: {error}") from error
    parsed = parse_lines(lines, format_)
    if not parsed.entries:
        why = f"; line {parsed.bad[0].number}: {parsed.bad[0].reason}" if parsed.bad else ", it is empty"
        raise LexiconError(f"{path} holds no pronunciation in the format {parsed.format}{why}: give its format")
    return parsed


def parse_lines(lines: Sequence[bytes], format_: Format | Literal["auto"] = "auto") -> Parsed:
    """Parse the lines of a lexicon, into composed letters (NFC) as transcripts have; see `read_lexicon`."""
    chosen = detect(lines[:_SAMPLE]) if format_ == "auto" else format_
    parsed, parse = Parsed(format=chosen), _PARSERS[chosen]
    for number, raw in enumerate(lines, start=1):
        try:
            line = _decoded(raw)
            if not line.strip() or (chosen == "cmudict" and line.startswith(";;;")):
                continue
            parsed.lines += 1
            word, pronunciation = parse(line)
        except _BadLineError as error:
            parsed.bad.append(BadLine(number, raw[:_SHOWN].decode("utf-8", "backslashreplace").strip(), str(error)))
            continue
        parsed.entries.setdefault(word, []).append(pronunciation)
    parsed.lines = sum(map(len, parsed.entries.values())) + len(parsed.bad)
    return parsed


def _decoded(raw: bytes) -> str:
    try:
        line = normalize("NFC", raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r"))
    except UnicodeDecodeError:
        raise _BadLineError("it is not UTF-8") from None
    if _CONTROL.search(line):
        raise _BadLineError("it contains control characters")
    return line


def detect(lines: Iterable[bytes]) -> Format:
    """Detects the format from the first lines of a file."""
    texts = [text for raw in lines if (text := raw.decode("utf-8", "replace").strip())]
    if any(text.startswith(";;;") for text in texts):
        return "cmudict"
    fields = [text.split() for text in texts]
    entries = [row for row in fields if len(row) > 1]
    numbers = sum(bool(_NUMBER.fullmatch(row[1])) for row in entries)
    if entries and numbers > len(entries) / 2:
        tabs = sum(_split_mfa(text) is not None for text in texts)
        return "mfa" if tabs > len(texts) / 2 else "kaldip"
    numbered = any(_ALTERNATIVE.fullmatch(row[0]) for row in entries)
    english = entries and all(_ARPABET.fullmatch(phone) for row in entries[:100] for phone in _uncommented(row[1:]))
    if english and numbered:  # with tabs, too, as Sphinx's tools write it
        return "cmudict"
    if any("\t" in text and " " not in text.split("\t", 1)[0] for text in texts):
        return "mfa"
    commented = any(" # " in text for text in texts)
    return "cmudict" if english and commented else "kaldi"


def _uncommented(fields: list[str]) -> Iterator[str]:
    for phone in fields:
        if phone == "#":
            return
        yield phone


def _split_mfa(text: str) -> tuple[str, list[str], str] | None:
    """Returns word, numbers and phones; None if the line is not in MFA's format with numbers."""
    word, *rest = text.split("\t")
    numbers = []
    while len(rest) > 1 and _NUMBER.fullmatch(rest[0].strip()):
        numbers.append(rest.pop(0).strip())
    return (word, numbers, " ".join(rest)) if numbers and rest else None


def _kaldi(line: str) -> tuple[str, Pronunciation]:
    word, *phones = line.split()
    return word, _pronunciation(phones)


def _kaldip(line: str) -> tuple[str, Pronunciation]:
    word, *rest = line.split()
    if not rest:
        raise _BadLineError("it has no phones")
    return word, _pronunciation(rest[1:], _probability(rest[0]))


def _cmudict(line: str) -> tuple[str, Pronunciation]:
    word, *rest = line.split()
    numbered = _ALTERNATIVE.fullmatch(word)
    return numbered["word"] if numbered else word, _pronunciation(list(_uncommented(rest)))


def _mfa(line: str) -> tuple[str, Pronunciation]:
    if "\t" not in line:
        return _kaldi(line)
    word, numbers, phones = _split_mfa(line) or (line.split("\t", 1)[0], [], line.split("\t", 1)[1])
    if not word.strip() or len(word.split()) > 1:
        raise _BadLineError("its first column is not one word")
    if len(numbers) not in (0, 1, 4):
        raise _BadLineError(f"it has {len(numbers)} numbers, not 0, 1 or 4")
    return word.strip(), _pronunciation(phones.split(), _probability(numbers[0]) if numbers else None)


def _pronunciation(phones: list[str], probability: float | None = None) -> Pronunciation:
    if not phones:
        raise _BadLineError("it has no phones")
    return Pronunciation(tuple(phones), probability)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _BadLineError("its second column is not a probability") from None
    if not 0 < value <= 1:
        raise _BadLineError("its probability is not above 0 and at most 1")
    return value


_PARSERS: dict[str, Callable[[str], tuple[str, Pronunciation]]] = {
    "kaldi": _kaldi,
    "kaldip": _kaldip,
    "cmudict": _cmudict,
    "mfa": _mfa,
}
