"""Every kind of features, with every expansion, in a bundle that transcribes."""

import pytest
import torch

from recognition.bundle import BundleSpec, load_bundle, save_bundle
from recognition.transcriber import Transcriber
from speech.features import FEATURES, CmvnStats, build_features
from speech.models import ConformerConfig
from speech.tokens import TokenConfig, train_tokenizer
from speech.vad import EverythingConfig

RATE = 8000
WIDENED = {"delta_order": 1, "splice_left": 1, "splice_right": 1, "stride": 2}


def make_spec(features):
    stats = CmvnStats(build_features(features, RATE).dim)
    stats.add(torch.randn(50, stats.dim, generator=torch.Generator().manual_seed(0)))
    return BundleSpec(
        sample_rate=RATE,
        features=features,
        stats=stats.to_dict(),
        tokenizer=train_tokenizer(TokenConfig(kind="characters"), ["one two"]).to_dict(),
        model=ConformerConfig(dim=8, layers=1, heads=2, kernel=3, channels=2, subsampling=2),
    )


@pytest.mark.parametrize("kind", sorted(kind for kind, config in FEATURES.items() if not config.adapted))
@pytest.mark.parametrize("cmvn", ["global", "sliding"])
def test_bundle_with_expanded_features_transcribes(tmp_path, kind, cmvn):
    spec = make_spec(FEATURES[kind](cmvn=cmvn, **FEATURES[kind].tiny, **WIDENED))
    torch.manual_seed(0)
    save_bundle(tmp_path, spec, {name: tensor.contiguous() for name, tensor in spec.build_model().state_dict().items()})
    loaded, model = load_bundle(tmp_path)
    assert loaded.features == spec.features
    waves, lengths = torch.randn(2, 8000) / 10, torch.tensor([8000, 5000])
    feats, frames = loaded.build_frontend()(waves, lengths)
    assert feats.shape == (2, int(frames[0]), 6 * build_features(spec.features, RATE).dim)
    log_probs, _ = model(feats, frames)
    assert torch.isfinite(log_probs).all()
    transcripts = Transcriber(tmp_path, vad=EverythingConfig()).transcribe([waves[0].numpy()])
    assert transcripts[0].error == ""
