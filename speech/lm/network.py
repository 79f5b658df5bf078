"""Language models that are networks: their configuration, what a training needs to know, and their files.

The engine of `training` trains them, as it trains acoustic models; the caller supplies it in `Sources.train`. A new
kind of network is one file beside `lstm.py`, with its configuration and its estimator, and one line in
`LANGUAGE_MODELS`.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator
from typing_extensions import override

from configurable.files import replace_file
from speech.files import check_finite
from speech.lm.base import Estimator, LanguageModel, LmConfig, LmError, Unit
from speech.lm.encoding import EncodedText, encode_text, load_block
from speech.lm.sources import Text
from speech.lm.vocabulary import SPECIAL, UNKNOWN_ID, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from speech.lm.network_model import NetworkModel
    from speech.models.networks.base import TrainableNetwork

MODEL = "lm.safetensors"
"""File with the weights; its header has the words and the network's sizes."""
HEADER = "starling.language_model"


class NetworkConfig(LmConfig, ABC):
    """Configuration that all networks have."""

    unit: Unit = "word"
    """What is predicted; with characters, "▁" stands between words; `token` is the acoustic model's."""
    vocabulary: int | None = Field(default=20_000, ge=1)
    """Greatest number of words, the most frequent ones; others are unknown words. None for all."""

    layers: int = Field(default=1, ge=1)
    """Number of layers."""

    @abstractmethod
    def build_network(self, num_words: int) -> TrainableNetwork:
        """Make an initialized network, on torch's device `meta`, too; torch is imported in here.

        Args:
            num_words: Size of the vocabulary with the special words.
        """


class LmSpec(BaseModel):
    """What a training makes: a network and the words that it predicts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    members: ClassVar[tuple[str, ...]] = (MODEL,)
    """Names of the files that `save` writes."""

    network: SerializeAsAny[NetworkConfig]
    words: tuple[str, ...]
    """All words by number, the special ones first."""
    provenance: dict[str, Any] = {}

    @field_validator("network", mode="before")
    @classmethod
    def _kind(cls, value: Any) -> Any:
        if isinstance(value, NetworkConfig):
            return value
        from speech.lm import LANGUAGE_MODELS

        config = LANGUAGE_MODELS.get(str(value.get("kind"))) if isinstance(value, dict) else None
        if config is None:
            raise ValueError(f"{value!r} is no language model of this version of Starling")
        return config.model_validate(value)

    def build_model(self) -> TrainableNetwork:
        """The network, with random weights."""
        return self.network.build_network(len(self.words))

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the model into a folder."""
        from safetensors.torch import save

        replace_file(folder / MODEL, save(weights, {HEADER: self.model_dump_json()}))


@dataclass(frozen=True)
class NumberedText:
    """Text as word numbers of a limited vocabulary: what a network is trained on."""

    words: tuple[str, ...]
    """Words by number, the special ones first."""
    encoded: EncodedText
    numbers: NDArray[np.int64]
    """For each word of `encoded` its number in `words`."""

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yields arrays of numbers `<s> w w </s> <s> w …`, whole sentences."""
        for path in self.encoded.blocks:
            yield self.numbers[load_block(path)]


class NetworkTrainer(Protocol):
    """Trains a network."""

    def __call__(self, spec: LmSpec, text: NumberedText, folder: Path) -> dict[str, Any]:
        """Train a network on text, and write what `LmSpec.save` writes.

        Args:
            spec: What to train.
            text: The training text.
            folder: Where the model's file goes; it exists.

        Returns:
            Facts for the record, a JSON value.
        """


class NetworkEstimator(Estimator):
    """Numbers the text, has the network trained, and writes `lm.safetensors`."""

    cfg: NetworkConfig

    @property
    @override
    def unit(self) -> Unit:
        return self.cfg.unit

    @override
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[LanguageModel, dict[str, Any]]:
        if self.trainer is None:
            raise LmError(
                f"lm.kind {self.cfg.kind} is a network, which the stage lm of a pipeline trains: use `starling run`"
            )
        with tempfile.TemporaryDirectory(prefix=".lm-", dir=folder) as scratch:
            numbered = number(encode_text(text, Path(scratch)), self.cfg.vocabulary)
            spec = LmSpec(network=self.cfg, words=numbered.words)
            training = self.trainer(spec, numbered, folder)
            counts = dict(numbered.encoded.counts)
        model = self.load(folder)
        facts = {"text": counts, "training": training}
        return model, facts | {"parameters": model.num_parameters}

    @override
    def load(self, folder: Path) -> NetworkModel:
        return read_network(folder / MODEL)


def number(encoded: EncodedText, limit: int | None) -> NumberedText:
    """Number the words of a text by frequency; of equally frequent ones, those that come first.

    Args:
        encoded: The text.
        limit: Greatest number of words; the others get the number of the unknown word. None for all.
    """
    special = len(SPECIAL)
    counts = np.zeros(len(encoded.words), dtype=np.int64)
    for path in encoded.blocks:
        counts += np.bincount(load_block(path), minlength=len(counts))
    order = special + np.argsort(-counts[special:], kind="stable")[:limit]
    numbers = np.full(len(counts), UNKNOWN_ID)
    numbers[:special] = np.arange(special)
    numbers[order] = np.arange(special, special + len(order))
    return NumberedText((*SPECIAL, *(encoded.words[int(at)] for at in order)), encoded, numbers)


def read_network(path: Path) -> NetworkModel:
    """Read a network and its words.

    Raises:
        LmError: The file is no language model, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    from speech.lm.network_model import NetworkModel
    from speech.models.networks.base import load_network

    try:
        with safe_open(str(path), "pt") as file:
            spec = LmSpec.model_validate_json((file.metadata() or {}).get(HEADER, ""))
        network = load_network(path, spec.build_model, spec.network.layers)
        check_finite(network.state_dict())
        words = Vocabulary(spec.words)
        if tuple(words) != spec.words:
            raise ValueError("a word is listed twice, or the special ones are not the first")
    except (OSError, ValueError, SafetensorError) as error:
        raise LmError(
            f"{path} cannot be read as a language model: {error}; make it again, or correct the path"
        ) from error
    return NetworkModel(words, network)
