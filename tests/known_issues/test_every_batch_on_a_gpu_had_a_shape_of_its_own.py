"""On a GPU, nearly every batch had a new shape, for which cuFFT and cuDNN made a plan, and kept it."""

import pytest
import torch
import torchaudio
from support import load_beside

from recognition.systems.acoustic import FrameRecognizer
from speech.features import LogMelConfig, build_features
from speech.features.augment import AUGMENTATIONS, SpeedConfig

emulation = load_beside(__file__, "../training/emulated_gpu.py")
RATE = 8000


def there(tensor):
    return emulation.as_kind(emulation.OnGpu, tensor)


def test_transforms_have_few_sizes_and_the_same_results(monkeypatch):
    extract, seen = build_features(LogMelConfig(num_mels=20), RATE), set()
    compute = LogMelConfig.compute
    monkeypatch.setattr(
        LogMelConfig, "compute", lambda self, bank, frames: seen.add(frames.shape[1]) or compute(self, bank, frames)
    )
    for samples in range(2000, 40_000, 1111):
        waves, lengths = torch.randn(2, samples), torch.tensor([samples, samples // 2])
        wanted, counts = extract(waves, lengths)
        before = set(seen)
        with emulation.emulated_gpu(monkeypatch):
            feats, frames = extract(there(waves), there(lengths))
        assert {size % 64 for size in seen - before} <= {0}
        assert frames.tolist() == counts.tolist()
        torch.testing.assert_close(feats.as_subclass(torch.Tensor), wanted, rtol=1e-4, atol=1e-4)


def test_few_lengths_are_resampled_and_give_the_same_waveforms(monkeypatch):
    speed, seen = AUGMENTATIONS["speed"].build(SpeedConfig(factors=(0.9, 1.1)), RATE), []
    resample = torchaudio.transforms.Resample.forward
    monkeypatch.setattr(
        torchaudio.transforms.Resample, "forward", lambda self, wave: seen.append(wave) or resample(self, wave)
    )
    for samples in range(4000, 30_000, 3333):
        waves, lengths = torch.randn(4, samples), torch.tensor([samples, samples // 2, samples // 3, samples])
        drawn = speed.draw(lengths, [1, 2, 3, samples])
        wanted, counts = speed.apply(waves, lengths, drawn)
        seen.clear()
        with emulation.emulated_gpu(monkeypatch):
            changed, frames = speed.apply(there(waves), there(lengths), drawn)
        assert seen
        assert all(wave.shape[1] % 8192 == 0 for wave in seen)
        assert frames.tolist() == counts.tolist()
        torch.testing.assert_close(changed.as_subclass(torch.Tensor), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trim_db", [0.0, 40.0])
@pytest.mark.parametrize("kind", ["conformer", "blstm"])
def test_recognition_has_few_shapes_and_the_same_scores(corpus, tones, kind, trim_db, monkeypatch):
    spec = corpus.spec(kind, model=tones.bare(kind), features=LogMelConfig(num_mels=16, trim_db=trim_db))
    torch.manual_seed(0)
    recognizer = FrameRecognizer(spec, spec.build_model().eval())
    waves, lengths = torch.randn(3, 9000), torch.tensor([9000, 4000, 0])
    wanted, seen, forward = recognizer.encode(waves, lengths), [], recognizer.model.forward
    monkeypatch.setattr(recognizer.model, "forward", lambda feats, *rest: seen.append(feats) or forward(feats, *rest))
    recognizer.device = emulation.GPU
    with emulation.emulated_gpu(monkeypatch):
        scores = recognizer.encode(waves, lengths)
    assert seen[0].shape[1] % 64 == 0
    assert scores.log_probs.shape == wanted.log_probs.shape
    for log_probs, other, count in zip(scores.log_probs, wanted.log_probs, wanted.frames, strict=True):
        torch.testing.assert_close(log_probs[:count], other[:count], rtol=1e-3, atol=1e-3)
    assert torch.equal(scores.frames, wanted.frames)
    assert torch.equal(scores.starts, wanted.starts)
