"""Speakers of each set, and speakers shared by training and test sets, which make test results too good.

A speaker is identified by name within a corpus. Utterances without a name have unknown speakers: a number of speakers
is then a lower bound, and where no utterance has a name, it is unknown, not zero.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configurable.wording import counted
from tasks.config.data import DataConfig
from tasks.dataset.sets import VALID, Mask, Sets, is_trained, source_numbers, values
from tasks.dataset.splits import TRAIN, Ints, SplitError, encode
from tasks.figures import speakers_text

_SHOWN = 8


@dataclass(frozen=True)
class Shared:
    """Speakers that a set shares with the training set."""

    speakers: int
    """Number of shared speakers."""
    utterances: int
    """Number of their utterances in this set."""
    names: tuple[str, ...]
    """Names of some of them."""

    def text(self) -> str:
        """Number and names, for a message."""
        more = ", …" if self.speakers > len(self.names) else ""
        return f"{counted(self.speakers, 'speaker')} ({', '.join(self.names)}{more})"


class SetSpeakers:
    """The speakers of each set.

    Args:
        path: Table of checked utterances.
        sets: Set of each row.
    """

    def __init__(self, path: Path, sets: Sets) -> None:
        self._path, self._sets = path, sets
        pairs = zip(values(path, "corpus"), values(path, "speaker"), strict=True)
        self._who, self._names = encode(f"{corpus}\t{speaker}" for corpus, speaker in pairs)
        known = np.array([not name.endswith("\t") for name in self._names], dtype=bool)
        trained = np.isin(sets.codes, [code for code, name in enumerate(sets.names) if is_trained(name)])
        heard: NDArray[np.bool_] = np.zeros(len(self._names), dtype=bool)
        heard[self._who[trained]] = True
        self._known: Mask = known[self._who] if len(self._who) else np.zeros(0, dtype=bool)
        self._shared: Mask = (heard & known)[self._who] if len(self._who) else np.zeros(0, dtype=bool)

    def counts(self) -> dict[str, dict[str, int]]:
        """By set, the number of `speakers` with a name, and of `unnamed` utterances, if there are any."""
        counts = {}
        for name, rows in self._rows_by_set():
            unnamed = int((rows & ~self._known).sum())
            counts[name] = {"speakers": len(self._speakers_of(rows))} | ({"unnamed": unnamed} if unnamed else {})
        return counts

    def shared(self) -> dict[str, Shared]:
        """Speakers shared with the training set, by set; only sets outside training that share any."""
        entries = {
            name: self._describe(rows & self._shared) for name, rows in self._rows_by_set() if not is_trained(name)
        }
        return {name: entry for name, entry in entries.items() if entry.utterances}

    def check(self, data: DataConfig) -> None:
        """Check the sets against the configuration.

        Raises:
            SplitError: If training speakers are in another set, or may be since speakers are unknown, and
                `speaker_overlap` is `refuse`; or if one source defines a set, and another source of the same corpus
                adds training speakers to it by the corpus' own split.
        """
        if data.speaker_overlap == "refuse":
            for name, entry in self.shared().items():
                raise SplitError(
                    f"{entry.text()} of the training set are also in {name!r}, and data.speaker_overlap is refuse: "
                    f"leave them out with data.sources.*.exclude_speakers, or set data.speaker_overlap: allow"
                )
            if unknown := _unknown_text(self.counts()):
                raise SplitError(
                    f"{unknown}, and data.speaker_overlap is refuse: {_NAME_THEM}, or set data.speaker_overlap: allow"
                )
        if data.speaker_overlap == "warn" and data.split_by == "speaker":
            self._check_own_splits(data)

    def _check_own_splits(self, data: DataConfig) -> None:
        for number, source in enumerate(data.sources):
            same = [n for n, other in enumerate(data.sources) if (other.kind, other.path) == (source.kind, source.path)]
            named = {data.sources[n].set: n for n in same if data.sources[n].set not in ("", TRAIN)}
            if source.set or not named:
                continue
            here = source_numbers(self._path, len(self._sets.codes)) == number
            for name, rows in self._rows_by_set():
                entry = self._describe(rows & self._shared & here)
                if name in named and entry.utterances:
                    raise SplitError(
                        f"data.sources.{named[name]} defines the set {name!r}, but data.sources.{number} is divided by "
                        f"its corpus' own split, which adds {entry.utterances} utterance(s) of {entry.text()} of the "
                        f"training set to {name!r}. Set data.sources.{number}.own_split: false to train on them, or "
                        "data.speaker_overlap: allow to test on them"
                    )

    def _rows_by_set(self) -> list[tuple[str, Mask]]:
        sets = [(name, self._sets.codes == code) for code, name in enumerate(self._sets.names)]
        return sorted((name, rows) for name, rows in sets if rows.any())

    def _speakers_of(self, rows: Mask) -> Ints:
        speakers: Ints = np.unique(self._who[rows & self._known])
        return speakers

    def _describe(self, rows: Mask) -> Shared:
        speakers = self._speakers_of(rows)
        names = sorted({self._names[code].partition("\t")[2] for code in speakers.tolist()})
        return Shared(len(speakers), int((rows & self._known).sum()), tuple(names[:_SHOWN]))

    def record(self) -> dict[str, Any]:
        """Shared speakers by set, for the stage's record."""
        return {name: asdict(entry) | {"names": list(entry.names)} for name, entry in self.shared().items()}


_NAME_THEM = "name them in the corpus"


def _unknown_text(sets: Mapping[str, Mapping[str, int]]) -> str:
    """That training speakers may be in other sets, because speakers are unknown; empty if they cannot.

    Args:
        sets: `SetSpeakers.counts`.
    """
    unnamed = [f"{entry['unnamed']:,} in {name!r}" for name, entry in sets.items() if entry.get("unnamed")]
    if not unnamed or len({is_trained(name) for name in sets}) == 1:
        return ""
    return f"some utterances have no speaker ({', '.join(unnamed)}): training speakers may be in other sets"


def set_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Utterances, hours and speakers of each set, from the prepare stage's record.

    `speakers` and `trained_on` (those of the training set among them) are None where they are unknown. `unnamed` is
    the number of utterances without a speaker, if there are any: the other two are then lower bounds. `contaminated`
    is the number of utterances of another set whose recordings training has, too, if it has any.
    """
    sets, shared = record["sets"], record["shared_speakers"]
    unheard = any(map(is_trained, sets)) and not any(sets[name]["speakers"] for name in sets if is_trained(name))
    rows = []
    for name, entry in sets.items():
        unnamed = {"unnamed": entry["unnamed"]} if entry.get("unnamed") else {}
        speakers = entry["speakers"] or (None if unnamed else 0)
        also = speakers if is_trained(name) else shared.get(name, {}).get("speakers", 0)
        row = {"set": name, "utterances": entry["utterances"], "hours": round(entry["seconds"] / 3600, 3)}
        row |= {"speakers": speakers, "trained_on": None if unheard or speakers is None else also}
        heard = record.get("contaminated", {}).get(name, {}).get("left", 0)
        rows.append(row | unnamed | ({"contaminated": heard} if heard else {}))
    return rows


def sets_text(record: dict[str, Any]) -> str:
    """Utterances, hours and speakers of each set in one line, for a log."""
    parts = []
    for row in set_rows(record):
        who = speakers_text(row["speakers"], row.get("unnamed", 0))
        speakers = "speakers unknown" if row["speakers"] is None else f"{who} speakers"
        parts.append(f"{row['set']} {row['utterances']:,} utterances, {row['hours']:.2f} h, {speakers}")
    return "; ".join(parts)


def overlap_warnings(record: dict[str, Any], data: DataConfig) -> list[str]:
    """A warning for each set that shares speakers with the training set, and one if that is unknown for some speakers.

    There is none of these if the configuration allows it. There is always one if the validation set has no new voice,
    and another set has only new ones: what is chosen on the former need not suit the latter.
    """
    return _voices_of_validation(record) + _overlaps(record, data)


def _voices_of_validation(record: dict[str, Any]) -> list[str]:
    """A warning if the speakers of the validation set are all trained on, and those of other sets are all new."""
    sets, shared = record["sets"], record["shared_speakers"]
    heard = {name: shared.get(name, {}).get("speakers", 0) for name in sets if not is_trained(name)}
    named = {name for name in heard if sets[name]["speakers"] and not sets[name].get("unnamed")}
    new = sorted(name for name in named - {VALID} if not heard[name])
    if VALID not in named or heard[VALID] < sets[VALID]["speakers"] or not new:
        return []
    return [
        f"all speakers of the validation set are trained on, and those of {' and '.join(map(repr, new))} are new: the "
        "epoch and the decoding weights that are best on the former may not be so for new voices, whose WER is often "
        "several times as high. Set some speakers aside for validation (data.split_by: speaker, or a source of theirs "
        "with set: valid) if there are enough"
    ]


def _overlaps(record: dict[str, Any], data: DataConfig) -> list[str]:
    if data.speaker_overlap == "allow" or data.split_by == "utterance":
        return []
    shared = {name: Shared(**entry) for name, entry in record["shared_speakers"].items()}
    warnings = [
        f"{entry.text()} of the training set are also in {name!r}: {entry.utterances} of its "
        f"{record['sets'][name]['utterances']} utterances. If this is intended, set data.speaker_overlap: allow; "
        "otherwise remove them from one of the sets with data.sources.*.exclude_speakers"
        for name, entry in shared.items()
    ]
    partly = any(entry["speakers"] and entry.get("unnamed") for entry in record["sets"].values())
    # where only some utterances lack a speaker, the tables show that numbers are bounds
    if not partly and (unknown := _unknown_text(record["sets"])):
        warnings.append(f"{unknown}. If this is intended, set data.speaker_overlap: allow; otherwise {_NAME_THEM}")
    return warnings
