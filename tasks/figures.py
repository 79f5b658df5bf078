"""Figures for people."""


def percent(rate: float | None, digits: int = 2) -> str:
    """Format a rate as percentage; a dash for None."""
    return "–" if rate is None else f"{100 * rate:.{digits}f} %"


def p_value_text(value: float) -> str:
    """Format the p-value of a test."""
    return f"p = {value:.3g}" if value >= 0.001 else "p < 0.001"
