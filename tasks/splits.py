"""Dividing utterances into sets: speakers kept apart, the same division every time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


class SplitError(ValueError):
    """The utterances cannot be divided as asked."""


@dataclass(frozen=True)
class Item:
    """What a split needs to know of an utterance."""

    id: str
    speaker: str


def split_utterances(
    items: Sequence[Item], shares: dict[str, float], *, by: str = "speaker", seed: int = 0
) -> dict[str, str]:
    """Give each utterance a set; what no share claims goes to `train`.

    Groups (speakers, or single utterances) are taken in an order given by a hash of seed and name, so that adding a
    speaker moves few others. A set takes groups until it has its share of the utterances, and at least one group.

    Args:
        items: The utterances.
        shares: Set name to share of the utterances.
        by: `speaker` or `utterance`.
        seed: Chooses among divisions.

    Returns:
        Utterance id to set name.

    Raises:
        SplitError: If there are fewer groups than sets.
    """
    wanted = {name: share for name, share in shares.items() if share > 0}
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(item.speaker if by == "speaker" else item.id, []).append(item.id)
    if len(groups) < len(wanted) + 1:
        raise SplitError(
            f"{len(groups)} {by}(s) cannot be divided into {', '.join(['train', *wanted])}: name the sets in "
            "data.sources.*.set, or use data.split_by: utterance (speakers then appear in several sets)"
        )
    order = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).hexdigest())
    result: dict[str, str] = {}
    position = 0
    for left, (name, share) in enumerate(wanted.items()):
        taken, goal = 0, share * len(items)
        spare = len(wanted) - left  # groups that the sets after this one, and train, need at least
        while position < len(order) - spare and (taken == 0 or taken + len(groups[order[position]]) / 2 <= goal):
            taken += len(groups[order[position]])
            result.update(dict.fromkeys(groups[order[position]], name))
            position += 1
    for group in order[position:]:
        result.update(dict.fromkeys(groups[group], "train"))
    return result
