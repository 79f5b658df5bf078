"""Who speaks in the utterances of a transcript: as it says, as Kaldi's `utt2spk` says, or as ids of NIST's form say.

    ann-1 ann

is a line of `utt2spk`: utterance, speaker. `(ann-utt1)` is an id of NIST's form: speaker, hyphen, utterance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from speech.scoring.formats import TranscriptEntry
from speech.scoring.formats.base import TranscriptError, read_lines, without_comments

_TABLE = "utt2spk"


@dataclass(frozen=True)
class NamedSpeakers:
    """The speakers of a reference's utterances."""

    source: str = ""
    """Where they come from, in words; empty if they are unknown."""
    table: Mapping[str, str] = field(default_factory=dict)
    """Speakers by utterance, from a file."""
    in_ids: bool = False
    """Whether ids begin with the speaker."""

    def of(self, entry: TranscriptEntry) -> str:
        """An utterance's speaker; empty if speakers are unknown."""
        if not self.source:
            return ""
        return entry.speaker or self.table.get(entry.id, "") or (_before_hyphen(entry.id) if self.in_ids else "")


def find_speakers(path: Path, entries: Iterable[TranscriptEntry]) -> NamedSpeakers:
    """Find out who speaks in a reference.

    Ids tell the speaker, as in NIST's trn, if each has the form `speaker-utterance` and most speakers occur again:
    otherwise what comes before a hyphen is a part of a name, such as that of a unique file.

    Args:
        path: The reference; a file `utt2spk` beside it is read if that names all utterances.
        entries: Its utterances.

    Raises:
        TranscriptError: The file `utt2spk` is not UTF-8, or a line of it has not two fields.
    """
    unnamed = [entry.id for entry in entries if not entry.speaker]
    if not unnamed:
        return NamedSpeakers(f"named in {path.name}")
    table = _read_table(path.with_name(_TABLE))
    if table.keys() >= set(unnamed):
        return NamedSpeakers(f"from {_TABLE} beside {path.name}", table)
    counts = Counter(map(_before_hyphen, unnamed))
    again = sum(count for count in counts.values() if count > 1)
    if "" not in counts and 2 * again >= len(unnamed):
        return NamedSpeakers("the part of the ids before the first hyphen", in_ids=True)
    return NamedSpeakers()


def _before_hyphen(id_: str) -> str:
    """What precedes the first hyphen of an id; empty if nothing precedes or follows one."""
    before, _, after = id_.partition("-")
    return before if after else ""


def _read_table(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    speakers = {}
    for line, content in without_comments(read_lines(path), comment=""):
        id_, *speaker = content.split()
        if len(speaker) != 1:
            raise TranscriptError(f"{path}, line {line}: write: utterance-id speaker")
        speakers[id_] = speaker[0]
    return speakers
