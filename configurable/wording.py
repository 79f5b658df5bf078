"""Words of messages that depend on numbers."""


def counted(count: int, noun: str) -> str:
    """A number of things, such as `1 word` and `1,200 words`.

    Args:
        count: How many.
        noun: The singular of a noun whose plural ends with s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
