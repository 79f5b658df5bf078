"""Global mapping files (GLM): NIST's rules that make spellings comparable before scoring, applied as csrfilt does.

    ;; comment
    * case_sensitive = 'F'
    [IT'S]  => [{IT IS / IT HAS}]  / [ ] __ [ ]
    [UH]    => [(%HESITATION)]     / [ ] __ [ ]  ;; comment

A rule replaces a text wherever the texts before and after it are those around `__`: with `[ ]` on both sides, whole
words. At each place, the first rule of the file that fits is applied; contexts are those of the original text. After
`;; INPUT_DEPENDENT_APPLICATION = "ctm|ref"`, rules apply only to formats or purposes (ref, hyp) that the expression
fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from speech.scoring.formats.base import Purpose, TranscriptError, read_lines

TextFilter = Callable[[str], str]

_OPTION = re.compile(r"\*\s*(?P<name>\w+)\s*=?\s*['\"](?P<value>[^'\"]*)['\"]")
_LONGEST_RULE = 2000
"""Characters; the time to read a rule may grow with the cube of its length."""
_LONGEST_EXPRESSION = 80
_ALTERNATIVES = r"(?:[\w|^$-]|\[\w+\]|\.\*?)*"
_INPUTS = re.compile(rf"\^?\({_ALTERNATIVES}\)\$?|{_ALTERNATIVES}")
"""Alternatives without repetitions but `.*`: other expressions of a few characters fill the memory when they are
compiled, `(?:(?:x{99}){99}){99}`, or never finish, `(a|a)*(a|a)*…`."""
_DEPENDENT = re.compile(r";;\s+INPUT_DEPENDENT_APPLICATION\s*=\s*\"(?P<inputs>[^\"]*)\"")
_SIDE = (
    r"(?:\[(?P<{0}>(?:(?!\]\s+/\s).)*?)\]|\"(?P<{0}_quoted>[^\"\[\]]*)\"|(?P<{0}_bare>[^\s{1}](?:[^{1}]*[^\s{1}])?))"
)
_RULE = re.compile(
    _SIDE.format("old", r"\[\]")
    + r"\s*=>\s+"
    + _SIDE.format("new", r"\[\]{}/")
    + r"(?:\s*/\s+(?:\[(?P<left>[^\]]*)\]\s+)?__\w*(?:\s+\[(?P<right>[^\]]*)\])?)?\s*(?:(?<=\])\s*;.*)?"
)
_COMMENT = re.compile(r";+|[^\w\s*\[]+(?!\S)")
_SPACES = re.compile(r"\s+")
_HYPHEN = re.compile(r"([^( ])-(?=[^) ])")
_SECOND_WORD = re.compile(r"(\(\s+[^()\s]+\s+)([^()\s]+)")


@dataclass(frozen=True)
class GlmRule:
    """A replacement of one text by another."""

    old: str
    new: str
    left: str
    """Text that must precede."""
    right: str
    """Text that must follow."""
    inputs: str | None = None
    """Expression that a format or purpose must fit; None: all do."""

    def applies(self, format_name: str, purpose: Purpose) -> bool:
        """Whether the rule is for such input."""
        return self.inputs is None or any(re.search(self.inputs, name) for name in (format_name, purpose))


@dataclass(frozen=True)
class GlobalMap:
    """The rules of a file."""

    rules: tuple[GlmRule, ...]
    case_sensitive: bool = True

    def filter(
        self, format_name: str, purpose: Purpose, *, ignore_case: bool = True, split_hyphens: bool = False
    ) -> TextFilter:
        """Returns a function that applies the rules for such input to a text.

        Args:
            format_name: Format of the transcript.
            purpose: Whether it is the reference or a hypothesis.
            ignore_case: Whether texts are compared in lower case; rules then ignore case, too.
            split_hyphens: Replace hyphens within words by spaces afterwards (csrfilt's -dh).
        """
        rules = [rule for rule in self.rules if rule.applies(format_name, purpose)]
        matcher = _Matcher(rules, ignore_case or not self.case_sensitive)

        def apply(text: str) -> str:
            # parentheses are words of their own while rules are applied
            spaced = re.sub(r"([()])", r" \1 ", text)
            _check_parentheses(spaced, text)
            mapped = matcher.replace(f" {' '.join(spaced.split())} ")
            if split_hyphens:
                mapped = _HYPHEN.sub(r"\1 ", mapped)
            return _attach_parentheses(mapped)

        return apply


NO_RULES = GlobalMap(())
"""Changes nothing but hyphens, if they are split."""


def read_glm(path: Path) -> GlobalMap:
    """Reads a global mapping file.

    Raises:
        TranscriptError: A line is not a rule, or an option is not supported.
    """
    return parse_glm(read_lines(path), str(path))


def parse_glm(lines: Iterable[str], source: str = "glm") -> GlobalMap:
    """Reads the lines of a global mapping file.

    Raises:
        TranscriptError: A line is not a rule, or an option is not supported.
    """
    rules: list[GlmRule] = []
    case_sensitive, inputs, comment = True, None, ""
    for number, raw in enumerate(lines, 1):
        line, where = raw.strip(), f"{source}, line {number}"
        if match := _DEPENDENT.match(line):
            inputs = _expression(match["inputs"].lower(), where)
        # as in rfilter1, what the file begins with marks comments
        comment = comment or _comment_mark(line)
        line = line.partition(";;")[0].partition(comment or ";;")[0].strip()
        if not line or (line.startswith(";") and not _RULE.fullmatch(line[: _LONGEST_RULE + 1])):
            continue
        if line.startswith("*"):
            if (option := _option(line, where))[0] == "case_sensitive":
                case_sensitive = option[1].lower() in ("t", "true", "y", "yes")
        else:
            rules.append(_rule(line, inputs, where))
    return GlobalMap(tuple(rules), case_sensitive)


def _comment_mark(line: str) -> str:
    """What marks comments in a file that begins with a line."""
    match = _COMMENT.match(line)
    return match[0] if match else ";;" if line else ""


def _expression(text: str, where: str) -> str:
    """An expression of a file, if it is of the kind that takes bounded time and memory to compile and to search."""
    # "*" stands for all inputs, although it is not an expression
    text = ".*" if text == "*" else text
    if len(text) > _LONGEST_EXPRESSION or not _INPUTS.fullmatch(text):
        raise TranscriptError(
            f"{where}: {text[:80]!r} is not supported: write formats and sides, such as ctm|ref, in which . is any "
            f"character and .* any text, with at most {_LONGEST_EXPRESSION} characters"
        )
    return text


def _option(line: str, where: str) -> tuple[str, str]:
    match = _OPTION.match(line)
    name, value = (match["name"].lower(), match["value"]) if match else ("", "")
    if name == "format" and value.upper() != "NIST1":
        raise TranscriptError(f"{where}: format {value!r} is not supported: only NIST1 is")
    if name == "copy_no_hit" and value.upper()[:1] not in ("T", "Y"):
        raise TranscriptError(f"{where}: copy_no_hit must be 'T': text without a rule is kept")
    return name, value


def _rule(line: str, inputs: str | None, where: str) -> GlmRule:
    if len(line) > _LONGEST_RULE:
        raise TranscriptError(f"{where}: a rule of {len(line)} characters: the longest may have {_LONGEST_RULE}")
    match = _RULE.fullmatch(line)
    if match is None:
        raise TranscriptError(f"{where}: not a rule: {line[:80]!r}; write: [old] => [new] / [ ] __ [ ]")
    old, new = (next(filter(None, match.group(side, f"{side}_quoted", f"{side}_bare")), "") for side in ("old", "new"))
    if not old:
        raise TranscriptError(f"{where}: there is nothing to replace: write a text in the first brackets")
    # texts have single spaces when rules are applied
    old, new, left, right = (_SPACES.sub(" ", text or "") for text in (old, new, match["left"], match["right"]))
    return GlmRule(old, new, left, right, inputs)


class _Matcher:
    """Applies rules to texts."""

    def __init__(self, rules: Iterable[GlmRule], ignore_case: bool) -> None:
        self.fold: TextFilter = _lower if ignore_case else str
        # the first character that a rule replaces finds the rules to try
        self.by_first: dict[str, list[tuple[str, str, str, str]]] = {}
        for rule in rules:
            old, left, right = (self.fold(text) for text in (rule.old, rule.left, rule.right))
            self.by_first.setdefault(old[0], []).append((old, left, right, rule.new))

    def replace(self, text: str) -> str:
        folded, parts, position = self.fold(text), [], 0
        while position < len(text):
            for old, left, right, new in self.by_first.get(folded[position], []):
                end = position + len(old)
                if (
                    folded.startswith(old, position)
                    and folded.startswith(right, end)
                    and folded.endswith(left, 0, position)
                ):
                    parts.append(new)
                    position = end
                    break
            else:
                parts.append(text[position])
                position += 1
        return "".join(parts)


def _lower(text: str) -> str:
    """Lower case of the same length."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


def _check_parentheses(spaced: str, text: str) -> None:
    depth = 0
    for token in spaced.split():
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth not in (0, 1):
            break
    if depth:
        raise ValueError(f"parentheses in {text[:80]!r} do not match: they mark words that may be left out")


def _attach_parentheses(text: str) -> str:
    """Puts parentheses around each word that was within a pair."""
    count = 1
    while count:
        text, count = _SECOND_WORD.subn(r"\1) ( \2", text, count=1)
    return " ".join(re.sub(r"\s+\)", ")", re.sub(r"\(\s+", "(", text)).split())
