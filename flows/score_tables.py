"""Tables of error rates for the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.figures import p_value_text, percent, speakers_text
from tasks.scores import interval


def score_table(sets: dict[str, Any]) -> Table:
    """Error rates by set."""
    table = Table(header_style="bold")
    table.add_column("set")
    for head in ("WER", "95 % interval", "CER", "sub", "ins", "del", "words", "utterances"):
        table.add_column(head, justify="right")
    for name, s in sets.items():
        counts = (f"{s[k]:,}" for k in ("sub", "ins", "del", "words", "utterances"))
        table.add_row(name, percent(s["wer"]), interval(s), percent(s["cer"]), *counts)
    return table


def print_scores(sets: dict[str, Any], console: Console) -> None:
    """Print error rates by set, and intervals over speakers for sets with several.

    Transcripts with capitals and punctuation have rates without them, too.
    """
    console.print(score_table(sets))
    if any("wer_normalized" in s for s in sets.values()):
        console.print(normalized_table(sets))
    if any(s.get("wer_speaker_low") is not None for s in sets.values()):
        console.print(speaker_table(sets))


def speaker_table(sets: dict[str, Any]) -> Table:
    """Intervals over speakers by set."""
    table = Table(header_style="bold")
    table.add_column("set")
    for head in ("WER", "95 % interval over speakers", "speakers"):
        table.add_column(head, justify="right")
    for name, s in sets.items():
        table.add_row(name, percent(s["wer"]), interval(s, "wer_speaker"), speakers_text(s.get("speakers", 1)))
    return table


def normalized_table(sets: dict[str, Any]) -> Table:
    """Error rates by set without capitals and punctuation."""
    table = Table(header_style="bold")
    table.add_column("set")
    for head in ("normalized WER", "normalized CER"):
        table.add_column(head, justify="right")
    for name, s in sets.items():
        table.add_row(name, percent(s.get("wer_normalized")), percent(s.get("cer_normalized")))
    return table


def label_table(labels: dict[str, dict[str, Any]]) -> Table:
    """Error rates by label, such as Switchboard and CallHome, of each system."""
    table = Table(header_style="bold")
    table.add_column("set")
    table.add_column("label")
    for head in ("WER", "words", "utterances"):
        table.add_column(head, justify="right")
    for name, members in labels.items():
        for label, counts in members.items():
            table.add_row(name, label, percent(counts["wer"]), f"{counts['ref_words']:,}", f"{counts['utterances']:,}")
    return table


def comparison_text(comparison: dict[str, Any]) -> str:
    """The outcome of the matched-pairs test of two systems, in one line."""
    if comparison["better"]:
        outcome = f"{comparison[comparison['better']]} is significantly better"
    else:
        outcome = f"no significant difference between {comparison['a']} and {comparison['b']}"
    z = "–" if comparison["z"] is None else f"{comparison['z']:.3f}"
    return (
        f"{outcome}: matched-pairs test over {comparison['segments']:,} segments, mean difference "
        f"{comparison['mean']:.3f} errors, Z = {z}, {p_value_text(comparison['p_value'])}"
    )
