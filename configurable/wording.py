"""Words of messages: numbers of things, what a misspelled name may mean, values of any length and encoding."""

from collections.abc import Collection
from difflib import get_close_matches

_LISTED = 20
"""Maximum number of names that a message lists."""


def counted(count: int, noun: str) -> str:
    """A number of things, such as `1 word` and `1,200 words`.

    Args:
        count: How many.
        noun: The singular of a noun whose plural ends with s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def nearest(name: str, known: Collection[str], cutoff: float = 0.4) -> str:
    """End of a message about an unknown name: the most similar known one, or all of them, shortened if they are many.

    Args:
        name: The unknown name.
        known: Known names; case is ignored in comparisons.
        cutoff: Minimum similarity of a name that is proposed, from 0 to 1 (`difflib`).
    """
    if near := similar(name, known, cutoff):
        return f"; did you mean {near!r}?"
    more = f", … ({len(known):,} in all)" if len(known) > _LISTED else ""
    return f"; there are: {', '.join([*known][:_LISTED])}{more}" if known else ""


def similar(name: str, known: Collection[str], cutoff: float = 0.4) -> str:
    """The known name that is most similar to a misspelled one; empty if none is similar enough.

    Args:
        name: The misspelled name.
        known: Known names; case is ignored in comparisons.
        cutoff: Minimum similarity, from 0 to 1 (`difflib`).
    """
    initials = "".join(word[:1] for word in name.split("_"))
    if len(initials) > 1 and initials in known:  # learning_rate is lr
        return initials
    folded = {other.casefold(): other for other in known}
    close = get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


def printable(text: str, most: int = 200) -> str:
    """A value for a message: what no terminal or file can hold is escaped, and the middle of a long one is left out.

    Args:
        text: Of any length; may contain control characters and the bytes of a file name that is not UTF-8.
        most: Longest result, in characters.
    """
    if len(text) > most:
        begin = (most - 3) * 2 // 3
        text = f"{text[:begin]} … {text[len(text) - (most - 3 - begin) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
