"""Figures and verdicts for people."""

LEARN_MORE = (
    "Train longer (train.epochs), in smaller batches (train.batch_seconds), and check that the transcripts match the "
    "recordings"
)
"""What helps if a model has learned nothing."""


def percent(rate: float | None, digits: int = 2) -> str:
    """Format a rate as percentage; a dash for None."""
    return "–" if rate is None else f"{100 * rate:.{digits}f} %"


def p_value_text(value: float) -> str:
    """Format the p-value of a test."""
    return f"p = {value:.3g}" if value >= 0.001 else "p < 0.001"


def clock(seconds: float | None) -> str:
    """Format a duration as hours, minutes, seconds; a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def speakers_text(named: int | None, unnamed: int = 0) -> str:
    """A number of speakers: `unknown` if no utterance names one, and `7 or more` if some utterances do not.

    Args:
        named: Number of speakers with a name; None or 0 if no utterance names one.
        unnamed: Number of utterances without a speaker.
    """
    if not named:
        return "unknown" if unnamed or named is None else "0"
    return f"{named:,}{' or more' if unnamed else ''}"


def brief(reason: str) -> str:
    """The reason of a decision without the remedies behind it."""
    return reason.partition(f". {LEARN_MORE}")[0]
