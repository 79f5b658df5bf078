"""Pairs the utterances of two transcripts for scoring: by id, or timed words with timed segments.

    pairs = load_pairs(Path("ref.stm"), Path("hyp.ctm"), rules=ScoringRules(alternatives=True))
    report = score_sets(pairs.rows, rules)

Words are given to segments as in sclite: a word belongs to the first segment that ends after the middle of the word,
so words in a gap count for the segment after it, and those after the last segment for the last. Words in an ignored
segment are dropped. Of segments that overlap, the later one gets no words until the earlier one ends: they are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from speech.scoring.counts import ScoringError, ScoringRow
from speech.scoring.formats import (
    Purpose,
    TimedSegment,
    TimedWord,
    TranscriptEntry,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    find_format,
    read_transcript,
)
from speech.scoring.glm import NO_RULES, GlobalMap, TextFilter
from speech.scoring.network import ScoringRules, parse_network, without_tags
from speech.scoring.speakers import NamedSpeakers, find_speakers

Missing = Literal["refuse", "delete"]
"""Utterances without a hypothesis: an error, or all of their words deleted."""
Extra = Literal["refuse", "insert", "ignore"]
"""Hypotheses without a reference: an error, all of their words inserted, or left out."""

_NAMED = 5  # examples in messages
_TOUCH_S = 0.005
"""Segments that overlap by less touch each other: their times are rounded."""


@dataclass(frozen=True)
class PairingRules:
    """How transcripts are read and paired."""

    ref_format: str = ""
    """Format of the reference; empty: by the file's name."""
    hyp_format: str = ""
    """Format of hypotheses; empty: by the file's name."""
    missing: Missing = "refuse"
    extra: Extra = "refuse"
    glm: GlobalMap | None = None
    """Rules that are applied to both texts."""
    split_hyphens: bool = False
    """Whether hyphens within words are replaced by spaces."""


@dataclass
class Pairs:
    """Utterances to score, and those that one side lacks."""

    rows: list[ScoringRow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Ids of utterances, or recordings and channels, without a hypothesis."""
    extra: list[str] = field(default_factory=list)
    """Ids of hypotheses, or recordings and channels, without a reference."""
    titles: dict[str, str] = field(default_factory=dict)
    """Titles of labels, in order."""
    speakers: str = ""
    """Where the speakers come from, in words; empty if they are unknown."""
    overlaps: list[str] = field(default_factory=list)
    """Segments of a recording and channel that are at the same time, two by two, in words."""


def load_pairs(ref: Path, hyp: Path, rules: ScoringRules, pairing: PairingRules | None = None) -> Pairs:
    """Reads two transcripts and pairs their utterances.

    Args:
        ref: The reference.
        hyp: The hypothesis.
        rules: How texts are read; errors of reading are reported with their line.
        pairing: Formats, text rules, and what to do with utterances that one side lacks.

    Raises:
        TranscriptError: A file cannot be read.
        ScoringError: An utterance is missing or extra and that is refused, or the formats do not fit each other.
    """
    pairing = pairing or PairingRules()
    formats = find_format(ref, pairing.ref_format), find_format(hyp, pairing.hyp_format)
    kinds = formats[0].holds, formats[1].holds
    if kinds not in (("utterances", "utterances"), ("segments", "words")):
        raise ScoringError(
            f"{ref} ({formats[0].name}) cannot be scored against {hyp} ({formats[1].name}): "
            "give stm as reference and ctm as hypothesis, or two files of utterances (trn, kaldi, jsonl)"
        )
    silent = pairing.missing == "delete"
    reference = _mapped(read_transcript(ref, "ref", formats[0].name), ref, "ref", formats[0], rules, pairing)
    hypothesis = _mapped(read_transcript(hyp, "hyp", formats[1].name, silent), hyp, "hyp", formats[1], rules, pairing)
    pairs = (
        _pair_times(reference, hypothesis)
        if reference.segments
        else _pair_utterances(
            reference.utterances, hypothesis.utterances, rules, find_speakers(ref, reference.utterances)
        )
    )
    return _settle(pairs, ref, hyp, pairing, timed=bool(reference.segments))


def share_extra(systems: list[Pairs]) -> list[Pairs]:
    """Gives all systems the same utterances: hypotheses without a reference that others have are empty."""
    extra = {row.id: row._replace(hyp="") for pairs in systems for row in pairs.rows}
    shared = []
    for pairs in systems:
        own = {row.id for row in pairs.rows}
        shared.append(replace(pairs, rows=pairs.rows + [row for id_, row in extra.items() if id_ not in own]))
    return shared


def _mapped(
    transcript: TranscriptFile,
    path: Path,
    purpose: Purpose,
    format_: TranscriptFormat,
    rules: ScoringRules,
    pairing: PairingRules,
) -> TranscriptFile:
    """Applies text rules to a transcript, and checks that its texts can be read."""
    change: TextFilter | None = None
    if pairing.glm or pairing.split_hyphens:
        glm = pairing.glm or NO_RULES
        change = glm.filter(format_.name, purpose, ignore_case=rules.ignore_case, split_hyphens=pairing.split_hyphens)

    def read(text: str, line: int) -> str:
        try:
            text = change(text) if change else text
            text = without_tags(text) if format_.tags and rules.alternatives else text
            if rules.reads_marks(text):
                parse_network(text, rules)
        except ValueError as error:  # a MarkupError, or parentheses that do not match
            raise TranscriptError(f"{path}, line {line}: {error}") from error
        return text

    return transcript.map_texts(read)


def _pair_utterances(
    reference: list[TranscriptEntry], hypothesis: list[TranscriptEntry], rules: ScoringRules, speakers: NamedSpeakers
) -> Pairs:
    """Pairs by id, in the order of the reference; the speaker and the domain are the reference's.

    If case is ignored, ids without a partner are paired with those that differ only in case.
    """
    texts = {entry.id: entry for entry in hypothesis}
    own = {entry.id for entry in reference}
    similar = {rules.fold(id_): id_ for id_ in texts if id_ not in own}
    pairs = Pairs(speakers=speakers.source)
    for entry in reference:
        id_ = entry.id if entry.id in texts else similar.get(rules.fold(entry.id), entry.id)
        partner = texts.pop(id_, None)
        if partner is None:
            pairs.missing.append(entry.id)
        hyp = partner.text if partner else ""
        pairs.rows.append(ScoringRow(entry.id, entry.text, hyp, speakers.of(entry), entry.domain))
    pairs.extra = list(texts)
    pairs.rows += [ScoringRow(entry.id, "", entry.text, speakers.of(entry), entry.domain) for entry in texts.values()]
    return pairs


_Channel = tuple[str, str]


class _Unit(NamedTuple):
    """A word or alternatives, and the middle of its time in seconds."""

    middle: float
    text: str


def _channel(unit: TimedWord | TimedSegment) -> _Channel:
    return unit.file.lower(), unit.channel.lower()


def _pair_times(reference: TranscriptFile, hypothesis: TranscriptFile) -> Pairs:
    """Gives each word to a segment of its recording and channel."""
    words: dict[_Channel, list[_Unit]] = {}
    for word in sorted(hypothesis.words, key=lambda word: word.start):
        words.setdefault(_channel(word), []).extend(_units(word))
    segments: dict[_Channel, list[TimedSegment]] = {}
    for segment in reference.segments:
        segments.setdefault(_channel(segment), []).append(segment)
    pairs = Pairs(titles=reference.labels, speakers="named in the segments")
    numbers: dict[str, int] = {}
    for channel, stretches in sorted(segments.items()):
        if channel not in words:
            pairs.missing.append(" ".join(channel))
        stretches.sort(key=lambda segment: segment.start)
        pairs.overlaps += _overlaps(stretches)
        texts = _share_out(stretches, words.pop(channel, []))
        for segment, text in zip(stretches, texts, strict=True):
            if not segment.ignored:
                number = numbers.get(segment.speaker, 0)
                numbers[segment.speaker] = number + 1
                id_ = f"{segment.speaker}-{number:03d}"
                labels = tuple(name for name in segment.labels if name in reference.labels or not reference.labels)
                pairs.rows.append(ScoringRow(id_, segment.text, text, segment.speaker, "", labels))
    for channel, units in sorted(words.items()):
        name = " ".join(channel)
        pairs.extra.append(name)
        pairs.rows.append(ScoringRow(name, "", " ".join(unit.text for unit in units), name))
    return pairs


def _share_out(segments: list[TimedSegment], units: Iterable[_Unit]) -> list[str]:
    """Gives units to segments, both in order of their starts; returns the segments' texts."""
    texts: list[list[str]] = [[] for _ in segments]
    current = 0
    for unit in units:
        while current < len(segments) - 1 and unit.middle >= segments[current].end:
            current += 1
        texts[current].append(unit.text)
    return [" ".join(parts) for parts in texts]


def _overlaps(segments: list[TimedSegment]) -> list[str]:
    """Names the segments, sorted by their starts, that begin before an earlier one ends."""
    overlaps, latest = [], None
    for segment in segments:
        if latest and latest.end - segment.start > _TOUCH_S and not (latest.ignored and segment.ignored):
            spans = (f"{it.speaker} {it.start:g}–{it.end:g} s (line {it.line})" for it in (latest, segment))
            overlaps.append(f"{segment.file} {segment.channel}: {' and '.join(spans)}")
        latest = segment if latest is None or segment.end > latest.end else latest
    return overlaps


def _units(word: TimedWord) -> list[_Unit]:
    """The words that rules have made of a word; they share its time.

    Alternatives stay together, at the middle of the word that ends last.
    """
    if "{" in word.text:
        sets = word.text.replace("{", " ").replace("}", " ").split("/")
        count = max(len(alternative.split()) for alternative in sets)
        return [_Unit(word.start + word.duration * (count - 0.5) / count, word.text)]
    parts = word.text.split()
    share = word.duration / max(1, len(parts))
    return [_Unit(word.start + share * (index + 0.5), part) for index, part in enumerate(parts)]


def _settle(pairs: Pairs, ref: Path, hyp: Path, pairing: PairingRules, timed: bool) -> Pairs:
    """Refuses or leaves out what one side lacks. A channel without words may be silent: its words are deleted."""
    if pairs.missing and pairing.missing == "refuse" and not timed:
        raise ScoringError(
            f"{hyp} lacks {_names(pairs.missing)} of {ref}: add them (with no words if nothing was recognized), or "
            "count their words as deletions with --missing delete"
        )
    if pairs.extra and pairing.extra == "refuse":
        raise ScoringError(
            f"{hyp} has {_names(pairs.extra)} that {ref} lacks: remove them, or use --extra insert (their words are "
            "insertions) or --extra ignore"
        )
    if pairing.extra == "ignore":
        pairs.rows = pairs.rows[: len(pairs.rows) - len(pairs.extra)]
    return pairs


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} utterance{'s' if len(names) > 1 else ''}: {', '.join(map(repr, names[:_NAMED]))}{more}"
