"""GigaSpeech: one JSON document with an array `audios` of long recordings, each with its `segments`.

Source: Chen et al. 2021, "GigaSpeech: An Evolving, Multi-Domain ASR Corpus with 10,000 Hours of Transcribed Audio". The
document has several gigabytes, so it is read one recording at a time.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from storage.corpora.base import CorpusError, CorpusReader, Utterance, as_number, as_text, checked_times, first_field

_PUNCTUATION = {"<COMMA>": ",", "<PERIOD>": ".", "<QUESTIONMARK>": "?", "<EXCLAMATIONPOINT>": "!"}
_GARBAGE = ("<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>")
_CHUNK = 1 << 20  # bytes that are read at once
_MAX_OBJECT = 1 << 26  # characters of one recording's object: the longest have a few million
_ARRAY = re.compile(r'"audios"\s*:\s*\[')
_BLANK = re.compile(r"[\s,]*")


class GigaSpeechReader(CorpusReader):
    """Reads `GigaSpeech.json`, or the folder that contains it; audio paths are relative to the document.

    Segments tagged as silence, music, noise or other are reported as problems. `{DEV}` is the set `valid`, `{TEST}` is
    `test`, the rest is `train`. The domain is the recording's source (audiobook, podcast, youtube).

    Options:
        subset: read only segments of this subset: XS, S, M, L, XL, DEV or TEST.
        punctuation: `drop` the tags such as `<COMMA>` (default), or `keep` them as characters.
    """

    LAYOUT = "`GigaSpeech.json`: long recordings with segments"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "GigaSpeech.json": '{"dataset": "GigaSpeech", "language": "EN", "audios": [\n'
        '{"aid": "A1", "path": "audio/youtube/A1.opus", "segments": [{"sid": "A1-0", "speaker": "N/A", '
        '"begin_time": 0.0, "end_time": 1.5, "subsets": ["{XL}"], "text_tn": "GOOD MORNING"}]},\n'
        '{"aid": "A2", "path": "audio/youtube/A2.opus", "segments": [{"sid": "A2-0", "speaker": "N/A", '
        '"begin_time": 1.0, "end_time": 3.0, "subsets": ["{XL}", "{TEST}"], "text_tn": "GOOD NIGHT <PERIOD>"}]}]}\n',
        "audio/youtube/A1.opus": "",
        "audio/youtube/A2.opus": "",
    }
    HAS_SETS = True
    OPTIONS = frozenset({"subset", "punctuation"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether it is a JSON document with an array `audios` near its start."""
        path = _document(root)
        if not path.is_file() or path.suffix != ".json":
            return False
        with path.open("rb") as file:
            return _ARRAY.search(file.read(1 << 16).decode("utf-8", "replace")) is not None

    def _utterances(self) -> Iterator[Utterance]:
        punctuation, subset = self.options.get("punctuation", "drop"), str(self.options.get("subset") or "")
        if punctuation not in ("drop", "keep"):
            raise CorpusError(f"option punctuation is {punctuation!r}: use drop or keep")
        document, subsets = _document(self.root), set[str]()
        for number, audio in enumerate(read_array(document)):
            if isinstance(audio, str):
                self._problem(f"{document.name}:{number}", "bad-line", audio)
                continue
            segments = audio.get("segments")
            for segment in segments if isinstance(segments, list) else ():
                if not isinstance(segment, dict) or not isinstance(segment.get("sid"), str):
                    self._problem(f"{audio.get('aid')}:{number}", "bad-line", "a segment has no sid")
                    continue
                own = _list(segment.get("subsets"))
                subsets.update(own)
                if not subset or f"{{{subset}}}" in own:
                    yield from self._segment(document, audio, segment, keep=punctuation == "keep")
        if subset and subsets and f"{{{subset}}}" not in subsets:
            names = ", ".join(sorted(name.strip("{}") for name in subsets))
            raise CorpusError(f"option subset is {subset!r}, but {document} has only the subsets {names}")

    def _segment(
        self, document: Path, audio: dict[str, Any], segment: dict[str, Any], keep: bool
    ) -> Iterator[Utterance]:
        utterance_id, text = segment["sid"], as_text(segment.get("text_tn"))
        if text is None:
            self._problem(utterance_id, "missing-transcript", "the segment has no text_tn")
            return
        if any(tag in text for tag in _GARBAGE):
            self._problem(utterance_id, "garbage", text)
            return
        try:
            start, end = checked_times(*(as_number(k, segment.get(k)) or 0.0 for k in ("begin_time", "end_time")))
        except ValueError as error:
            self._problem(utterance_id, "bad-segment", str(error))
            return
        utterance = self._make(
            utterance_id,
            document.parent / str(audio.get("path", "")),
            spell(text, keep),
            first_field(segment, ("speaker",)) or first_field(audio, ("aid",)) or "",
            start=start,
            end=end,
            duration=round((end or 0.0) - start, 6),
            domain=first_field(audio, ("source",)),
            split=_set(_list(segment.get("subsets"))),
        )
        if utterance:
            yield utterance

    def files(self) -> Iterator[Path]:
        """Yield the document and its recordings."""
        document = _document(self.root)
        yield document
        for audio in read_array(document):
            if not isinstance(audio, str) and audio.get("path"):
                yield document.parent / str(audio["path"])


def spell(text: str, keep: bool) -> str:
    """Replace punctuation tags by characters attached to the preceding word, or remove them."""
    for tag, character in _PUNCTUATION.items():
        text = re.sub(rf"\s*{tag}", character if keep else " ", text)
    return " ".join(text.split())


def _document(root: Path) -> Path:
    return root / "GigaSpeech.json" if root.is_dir() else root


def _list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _set(subsets: list[str]) -> str:
    return "valid" if "{DEV}" in subsets else "test" if "{TEST}" in subsets else "train"


def read_array(path: Path) -> Iterator[dict[str, Any] | str]:
    """Yield the objects of the document's array `audios`, one at a time; for a bad one, a description of the error.

    Raises:
        CorpusError: the file does not exist or has no such array.
    """
    if not path.is_file():
        raise CorpusError(f"{path} does not exist: name GigaSpeech.json or its folder")
    with path.open("rb") as file:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(file.read(_CHUNK))
        match = _ARRAY.search(head)
        if match is None:
            raise CorpusError(f'{path} has no array "audios": it is not the metadata of GigaSpeech')
        buffer, position = head, match.end()
        while True:
            position = _BLANK.match(buffer, position).end()  # type: ignore[union-attr]  # also matches the empty string
            if buffer.startswith("]", position):
                return
            try:
                value, position = json.JSONDecoder().raw_decode(buffer, position)
            except (ValueError, RecursionError) as error:
                more = decoder.decode(file.read(max(_CHUNK, len(buffer) - position)))
                if not more or len(buffer) - position > _MAX_OBJECT:
                    yield f"the document is truncated or damaged: {error}"
                    return
                buffer, position = buffer[position:] + more, 0
                continue
            yield value if isinstance(value, dict) else "not a JSON object"
