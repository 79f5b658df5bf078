"""The output of the stage align as a model: to align other data, and to recognize speech."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor

from speech.files import DAMAGED
from speech.hmm.config import AlignConfig
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import FeatureChain, HmmModel, ModelError, write_json
from speech.hmm.pronunciations import load_lexicon, word_pronunciations
from speech.lexicon import Lexicon, LexiconChoice, LexiconConfig, LexiconError, build_lexicon
from speech.text import NormalizerConfig
from storage.intact import readable
from storage.stages import StageOutput
from tasks.config.pipeline import PipelineConfig

_CONFIG = "align.json"
FILES = ("model/model.json", "model/model.safetensors", "lexicon/lexiconp.txt", "lexicon/silence.json", _CONFIG)
"""The files of a stage's output that are the model."""
_TRANSFORMS = "speakers.safetensors"


@dataclass(frozen=True)
class AlignmentModel:
    """A trained GMM-HMM with its lexicon and the configuration of its features."""

    model: HmmModel
    """The model."""
    lexicon: Lexicon
    """The lexicon of the training."""
    spoken: GraphOptions
    """Probabilities of pronunciations and silence."""
    config: AlignConfig
    """Configuration of features and alignment."""
    sample_rate: int
    """Sample rate of the audio, Hz."""
    normalizer: NormalizerConfig
    """How transcripts are normalized."""
    source: LexiconConfig
    """Where the pronunciations of further words come from."""

    @classmethod
    def load(cls, folder: Path) -> AlignmentModel:
        """Load a model from a folder with the files of a stage's output.

        Raises:
            ModelError: A file is missing or damaged.
        """
        lexicon, spoken = load_lexicon(folder / "lexicon")
        try:
            value = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            config, rate = AlignConfig.model_validate(value["align"]), int(value["sample_rate"])
            normalizer = NormalizerConfig.model_validate(value["normalizer"])
            source: LexiconConfig = TypeAdapter(LexiconChoice).validate_python(value["lexicon"])
        except DAMAGED as error:
            raise ModelError(f"{folder / _CONFIG} is no configuration of an alignment ({error!r})") from error
        model = HmmModel.load(folder / "model")
        if model.num_features != config.features.width:
            raise ModelError(
                f"{folder} has a model of {model.num_features} features, and a configuration of "
                f"{config.features.width}: align again"
            )
        return cls(model, lexicon, spoken, config, rate, normalizer, source)

    @classmethod
    def fetch(cls, output: StageOutput, folder: Path) -> AlignmentModel:
        """Load a model from the output of the stage align, by way of a local folder."""
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(output.read(name))
        return cls.load(folder)

    def pronunciations(self, words: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
        """Pronunciations of some words that the model's phones can express.

        Words that the lexicon of the training lacks come from its source, if that can still be read.
        """
        wanted = sorted(set(words))
        known = word_pronunciations(self.lexicon, wanted)
        missing = [word for word in wanted if word not in known]
        try:
            more = build_lexicon(self.source, dict.fromkeys(missing, 1)).lexicon if missing else None
        except LexiconError:
            more = None
        found = known | (word_pronunciations(more, missing) if more is not None else {})
        usable = {self.model.tree.phones.base(phone) for phone in range(1, len(self.model.tree.phones) + 1)}
        kept = {word: [one for one in ones if usable.issuperset(one)] for word, ones in found.items()}
        return {word: ones for word, ones in kept.items() if ones}


@lru_cache(maxsize=2)
def chain_and_transforms(align: str) -> tuple[FeatureChain, dict[str, Tensor]]:
    """LDA and MLLT, and the fMLLR transforms by set and speaker; cached for further work in this process.

    Args:
        align: URL of the stage's output.
    """
    output = StageOutput.at(align)
    with tempfile.TemporaryDirectory() as folder:
        model = AlignmentModel.fetch(output, Path(folder)).model
        path = output.fetch(_TRANSFORMS, Path(folder))
        with readable(f"{align}/{_TRANSFORMS}"):
            transforms = load_file(path)
            dim = model.gmm.dim
            if not all(one.shape == (dim, dim + 1) and one.isfinite().all() for one in transforms.values()):
                raise ValueError(f"a transform is not of {dim} features, or has numbers that are infinite or NaN")
        return model.chain, transforms


def write_config(config: PipelineConfig, folder: Path) -> None:
    """Write what a model needs of the pipeline's configuration into the folder of its files."""
    assert config.align is not None
    value: dict[str, Any] = {
        "align": config.align.model_dump(mode="json"),
        "sample_rate": config.data.sample_rate,
        "normalizer": config.data.normalizer.model_dump(mode="json"),
        "lexicon": config.lexicon.model_dump(mode="json"),
    }
    write_json(folder / _CONFIG, value)


def is_alignment_model(folder: Path) -> bool:
    """Whether a folder has the files of a stage's output."""
    return (folder / _CONFIG).is_file()
