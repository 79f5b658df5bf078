"""Figures for people."""


def percent(rate: float | None, digits: int = 2) -> str:
    """Format a rate as percentage; a dash for None."""
    return "–" if rate is None else f"{100 * rate:.{digits}f} %"
