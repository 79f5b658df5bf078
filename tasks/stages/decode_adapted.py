"""Decoding with models whose features are adapted to speakers: all of a speaker's utterances together.

Speakers are decoded in parallel through the pipeline's runner; after a kill, those that are done are not repeated.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from devices.choice import best_device
from recognition.inference import Decoded, open_set, recognize_set
from recognition.recognizer import Recognizer
from speech.decoding import DecodeChoice, DecodeConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.stages import StageOutput
from tasks.config.home import home
from tasks.stages.base import Run
from tasks.stages.bundles import adapt_bundle, fetch_bundle
from tasks.stages.by_speaker import Answer, Decoding, answered, joined, speaker_pieces
from tasks.stages.decoder_files import with_stage_files
from tasks.stages.process_cache import cached_once
from tasks.stages.runner import Piece, map_pieces


def decode_by_speaker(
    run: Run, work: ObjectStore, name: str, url: str, common: dict[str, Any], quarantine: ShardQuarantine
) -> list[Decoded]:
    """Decode a set speaker by speaker.

    Args:
        run: The run.
        work: Store for the answers until the stage is done.
        name: The set.
        url: Store of its audio.
        common: What all pieces of work have.
        quarantine: Takes damaged shards.
    """
    index = ShardIndex.read(ObjectStore(url))
    pieces = speaker_pieces(index, name, common | {"url": url, "work": work.url})
    answers = map_pieces(run.runner, "tasks.stages.decode_adapted:decode_speaker_piece", pieces, f"decode {name}")
    return joined(answers, index, name, quarantine)


def decode_speaker_piece(piece: Piece) -> Answer:
    """Decode one speaker's utterances."""

    def work(rows: Sequence[int]) -> Decoding:
        damaged: list[tuple[str, str]] = []
        recognizer = _recognizer(piece)
        dataset = open_set(piece["url"], recognizer.spec.sample_rate, home() / "cache")
        found = recognize_set(recognizer, dataset, on_damage=lambda error: damaged.append(error.damage), rows=rows)
        return {row: (one.hyp, one.score, one.confidence) for row, one in found.items()}, damaged

    return answered(piece, work)


_PARTS = ("model", "digest", "adaptation", "decode", "files", "device")
"""What a piece says about its recognizer."""


def _recognizer(piece: Piece) -> Recognizer:
    return _loaded(json.dumps({name: piece[name] for name in _PARTS}, sort_keys=True))


@cached_once(maxsize=1)
def _loaded(description: str) -> Recognizer:
    """The recognizer; cached for further speakers in this process."""
    parts = json.loads(description)
    decode: DecodeConfig = TypeAdapter(DecodeChoice).validate_python(parts["decode"])
    with tempfile.TemporaryDirectory(prefix="starling-model-") as folder:
        bundle = adapt_bundle(fetch_bundle(StageOutput.at(parts["model"]), Path(folder)), **parts["adaptation"])
        device = str(best_device(parts["device"]))
        recognizer = Recognizer.load(bundle, with_stage_files(decode, parts["files"]), device)
        recognizer.decoder.prepare()
    return recognizer
