"""Words of messages that depend on numbers, and values of any length and encoding in messages."""


def counted(count: int, noun: str) -> str:
    """A number of things, such as `1 word` and `1,200 words`.

    Args:
        count: How many.
        noun: The singular of a noun whose plural ends with s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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
