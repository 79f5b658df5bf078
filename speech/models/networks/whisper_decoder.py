"""Whisper's decoder (Radford et al. 2022, arXiv:2212.04356), and its weights from a folder in Hugging Face's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from typing_extensions import override

from configurable.wording import counted
from speech.files import check_finite, read_described
from speech.models.networks.transformer_decoder import TransformerDecoder
from speech.models.whisper_decoder import WhisperDecoderConfig
from speech.tokens import WhisperTokenizer

log = logging.getLogger(__name__)
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
_PREFIXES = ("model.decoder.", "decoder.")
"""What the names of the decoder's weights begin with: of the model for transcription, and of the bare model."""
_LARGEST_JSON = 64 << 20
"""Bytes of a description that are read at most."""


class WhisperDecoder(TransformerDecoder):
    """The Transformer decoder with trained positions and embeddings that are the output layer's weights, too."""

    cfg: WhisperDecoderConfig

    @override
    def _add_ends(self) -> None:
        self.most_tokens = self.cfg.positions
        self.embed_positions = nn.Embedding(self.cfg.positions, self.cfg.dim)

    @override
    def _embedded(self, tokens: Tensor, first: int) -> Tensor:
        places = self.embed_positions.weight[first : first + tokens.shape[-1]]
        out: Tensor = self.dropout(self.embed_tokens(tokens) + places)
        return out

    @override
    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed_tokens.weight)

    @property
    @override
    def timing_heads(self) -> list[tuple[int, int]]:
        return list(self.cfg.alignment_heads) or super().timing_heads


def read_json(folder: Path, name: str, optional: bool = False) -> dict[str, Any]:
    """A description of a folder's model.

    Args:
        folder: The folder.
        name: Of the file.
        optional: Whether a missing file is an empty description.

    Raises:
        ValueError: It is missing, damaged, or no mapping.
    """
    path = folder / name
    if optional and not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError("it is too large")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fetch the model again, or correct the path") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no mapping: fetch the model again")
    return value


def read_whisper_decoder(folder: Path) -> tuple[WhisperDecoderConfig, int, dict[str, Tensor]]:
    """Read the decoder of a Whisper model.

    Args:
        folder: In Hugging Face's format: `config.json`, `*.safetensors`, and `generation_config.json` if there is one.

    Returns:
        Its configuration, the number of tokens, and its weights by name in float32.

    Raises:
        ValueError: The folder has no such model, or it is damaged.
    """
    described = read_json(folder, CONFIG)
    try:
        cfg = WhisperDecoderConfig().described(described, read_json(folder, GENERATION, optional=True))
        vocab_size = int(described["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a Whisper decoder: {error}") from error
    return cfg, vocab_size, whisper_decoder_weights(cfg, vocab_size, sorted(folder.glob("*.safetensors")))


def whisper_decoder_weights(cfg: WhisperDecoderConfig, vocab_size: int, paths: Sequence[Path]) -> dict[str, Tensor]:
    """Weights of a Whisper model's decoder by name, in float32.

    Args:
        cfg: Its configuration.
        vocab_size: Number of tokens.
        paths: The model's safetensors files.

    Raises:
        ValueError: A file is damaged, or they are not of such a model.
    """
    try:
        with torch.device("meta"):
            wanted = cfg.build(cfg.dim, vocab_size).state_dict()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG} does not describe a Whisper decoder: {error}") from error
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors |= read_described(path, wanted, _own_name)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a Whisper model: {error}; fetch it again") from error
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(
            f"the Whisper model lacks {len(missing)} of the decoder's weights, such as {missing[0]}: fetch it again"
        )
    check_finite(tensors)
    return tensors


def _own_name(name: str) -> str | None:
    """Our name for a tensor of a file; None if it is not the decoder's."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), None)


def read_whisper_tokenizer(folder: Path, **asked: Any) -> WhisperTokenizer:
    """Read the tokenizer of a Whisper model, and which tokens it must not write.

    Args:
        folder: As of `read_whisper_decoder`, with `tokenizer.json`.
        **asked: Fields of `WhisperTokens`: language, task, prompt.

    Raises:
        ValueError: A file is missing or damaged, or the model does not know what it is asked for.
    """
    size, generation = read_json(folder, CONFIG).get("vocab_size"), read_json(folder, GENERATION, optional=True)
    model = json.dumps(with_missing_merges(read_json(folder, TOKENIZER)), ensure_ascii=False)
    return whisper_tokenizer(model, size, generation, **asked)


def whisper_tokenizer(model: str, size: Any, generation: Mapping[str, Any], **asked: Any) -> WhisperTokenizer:
    """The tokenizer of a Whisper model.

    Args:
        model: Its `tokenizer.json`.
        size: Its number of tokens.
        generation: Its `generation_config.json`; may be empty.
        **asked: Fields of `WhisperTokens`: language, task, prompt.

    Raises:
        TokenError: One of them is not what it should be.
    """
    suppressed = {
        "suppressed": generation.get("suppress_tokens") or (),
        "suppressed_first": generation.get("begin_suppress_tokens") or (),
    }
    tokenizer = WhisperTokenizer.from_dict({"model": model, "size": size, **suppressed, **asked})
    assert isinstance(tokenizer, WhisperTokenizer)
    return tokenizer


def with_missing_merges(described: dict[str, Any]) -> dict[str, Any]:
    """A byte-level `tokenizer.json` whose merges make every piece of its vocabulary.

    Some published files of Whisper base lack the first merge, that of the space and "t". A text is then recognized as
    before, but " the" is encoded as two pieces, which the model has never seen: trained on such targets, it forgets how
    words are written. Pieces are numbered in the order of their merges, which tells a missing one's place.

    Args:
        described: The file's content.

    Returns:
        It, with the missing merges; as it is if none is missing, or if it is no such file.
    """
    try:
        pieces: dict[str, int] = described["model"]["vocab"]
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in described["model"]["merges"]]
        own = {token["content"] for token in described.get("added_tokens") or ()}
        ranks = {(left, right): pieces[left + right] for left, right in pairs}
    except (AttributeError, KeyError, TypeError, ValueError):
        return described  # what reads it next says what is wrong with it
    if sorted(ranks.values()) != list(ranks.values()):
        return described  # numbered otherwise: nobody knows the places
    made = {left + right for left, right in pairs}
    missing: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=pieces.__getitem__):
        if len(piece) > 1 and piece not in made and piece not in own:
            parts = _merged_before(piece, ranks, pieces[piece])
            if len(parts) == 2:
                missing.append((parts[0], parts[1]))
                ranks[missing[-1]] = pieces[piece]
    if not missing:
        return described
    log.info(
        "%s lacks %s of pieces in its vocabulary, as some published files of Whisper base do (the first is %r and %r). "
        "They have been added here; the file stays as it is, and you need not do anything",
        TOKENIZER,
        counted(len(missing), "merge"),
        *missing[0],
    )
    merges = [list(pair) for pair in sorted(ranks, key=ranks.__getitem__)]
    return {**described, "model": {**described["model"], "merges": merges}}


def _merged_before(piece: str, ranks: Mapping[tuple[str, str], int], rank: int) -> list[str]:
    """What the merges before a rank make of a piece's bytes."""
    parts = list(piece)
    while len(parts) > 1:
        best, place = min((ranks.get((parts[i], parts[i + 1]), rank), i) for i in range(len(parts) - 1))
        if best >= rank:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def load_whisper_decoder(folder: Path) -> WhisperDecoder:
    """The decoder of a Whisper model, in evaluation mode on the CPU; arguments and errors as `read_whisper_decoder`."""
    cfg, vocab_size, weights = read_whisper_decoder(folder)
    network = WhisperDecoder(cfg, cfg.dim, vocab_size)
    network.load_state_dict(weights)
    return network.eval()
