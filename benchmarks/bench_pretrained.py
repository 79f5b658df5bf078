"""Speed of pretrained encoders on a CPU: ours beside the library's own forward pass, with the same weights and tensors.

    python -m benchmarks.bench_pretrained [--source FOLDER] [--rounds 5]

One thread, CPU seconds, forward and backward, medians of rounds in which both take turns. The library's Whisper wants
30 s, so the first table has 30 s of features for both. In the second, utterances are shorter: the library gets them
padded to 30 s, as its feature extractor does, ours as they are. The third is wav2vec 2.0's base size in a batch with
padding, which the library's mask tells it. Weights are random, of the published base sizes, or those of a folder with
Whisper.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import compare, show
from speech.models import PretrainedConfig, Wav2Vec2Config, WhisperConfig
from speech.models.networks.pretrained import PretrainedEncoder
from speech.models.pretrained import import_transformers

WHISPER = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
"""Of Whisper base."""
SHORT_S = (5, 12)
"""Utterances of the second table, about as long as LibriSpeech's."""
WAVES_S = (4, 6)


def ours(cfg: PretrainedConfig, theirs: Any, prefix: str) -> PretrainedEncoder:
    """Our network with the library's weights."""
    network = cfg.build(cfg.num_features, 2)
    assert isinstance(network, PretrainedEncoder)
    named = {cfg.own_name(prefix + name): tensor for name, tensor in theirs.state_dict().items()}
    fixed = {*network.fixed_tensors(), None}
    network.load_state_dict({name: tensor for name, tensor in named.items() if name not in fixed}, strict=False)
    return network.train()


def encode(network: PretrainedEncoder, feats: Tensor, lengths: Tensor) -> Tensor:
    """Outputs of our encoder without the output layer."""
    x, frames = network.subsampling(feats, lengths)
    outputs: Tensor = network.norm(network.run_layers(network.layers, x, frames))
    return outputs


def whisper(source: str, rounds: int) -> None:
    """Time Whisper's encoder."""
    library = import_transformers()
    module = library.models.whisper.modeling_whisper
    if source:
        config = library.WhisperConfig.from_pretrained(source)
        theirs = library.WhisperModel.from_pretrained(source, torch_dtype=torch.float32).encoder.train()
    else:
        config = library.WhisperConfig(**WHISPER)
        theirs = module.WhisperEncoder(config).train()
    network = ours(WhisperConfig(source="-").with_encoder(config.to_dict()), theirs, "encoder.")
    feats = torch.randn(1, 3000, config.num_mel_bins)
    whole = torch.full((1,), 3000)
    gap = (encode(network, feats, whole) - theirs(feats.transpose(1, 2)).last_hidden_state).abs().max()
    rivals = {
        "ours": lambda: encode(network, feats, whole).sum().backward(),
        "transformers": lambda: theirs(feats.transpose(1, 2)).last_hidden_state.sum().backward(),
    }
    seconds = compare(rivals, rounds, time.process_time)
    show(f"Whisper, 30 s, outputs differ by {gap:.0e}", seconds, "ours", "s of audio/s", 30.0)
    lengths = torch.tensor([100 * seconds for seconds in SHORT_S])
    short, padded = torch.randn(len(SHORT_S), 100 * max(SHORT_S), config.num_mel_bins), torch.zeros(len(SHORT_S), 3000)
    long = torch.nn.functional.pad(short, (0, 0, 0, padded.shape[1] - short.shape[1]))
    rivals = {
        "ours, as they are": lambda: encode(network, short, lengths).sum().backward(),
        "transformers, padded to 30 s": lambda: theirs(long.transpose(1, 2)).last_hidden_state.sum().backward(),
    }
    title = f"Whisper, utterances of {', '.join(map(str, SHORT_S))} s"
    show(title, compare(rivals, rounds, time.process_time), "ours, as they are", "s of audio/s", float(sum(SHORT_S)))


def wav2vec2(rounds: int) -> None:
    """Time wav2vec 2.0's encoder."""
    library = import_transformers()
    config = library.Wav2Vec2Config(layerdrop=0.0, mask_time_prob=0.0, attention_dropout=0.0, feat_proj_dropout=0.0)
    theirs = library.Wav2Vec2Model(config).train()
    network = ours(Wav2Vec2Config(source="-").with_encoder(config.to_dict()), theirs, "")
    lengths = torch.tensor([100 * seconds for seconds in WAVES_S])
    waves = torch.randn(len(WAVES_S), 16000 * max(WAVES_S))
    mask = (torch.arange(waves.shape[1]) < 160 * lengths[:, None]).long()
    waves *= mask
    rivals = {
        "ours": lambda: encode(network, waves.unflatten(1, (-1, 160)), lengths).sum().backward(),
        "transformers": lambda: theirs(waves, attention_mask=mask).last_hidden_state.sum().backward(),
    }
    title = f"wav2vec 2.0 base, utterances of {', '.join(map(str, WAVES_S))} s"
    show(title, compare(rivals, rounds, time.process_time), "ours", "s of audio/s", float(sum(WAVES_S)))


def main() -> None:
    """Time all and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="", help="folder with a Whisper model; random weights without")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    whisper(args.source, args.rounds)
    wav2vec2(args.rounds)


if __name__ == "__main__":
    main()
