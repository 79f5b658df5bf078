"""Log-mel extraction against torchaudio's Kaldi port and kaldi-native-fbank, one thread, 16 kHz noise."""

import kaldi_native_fbank as knf
import torch
import torchaudio
from common import compare, show

from speech.features import FeatureConfig, build_features

SECONDS, COUNT, RATE = 12, 24, 16000


def main() -> None:
    """Run and print."""
    torch.set_num_threads(1)
    waves = 0.1 * torch.randn(COUNT, SECONDS * RATE, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((COUNT,), SECONDS * RATE)
    ours = build_features(FeatureConfig(), RATE)

    def native() -> None:
        options = knf.FbankOptions()
        options.frame_opts.dither = 0.0
        options.mel_opts.num_bins = 80
        for wave in waves:
            fbank = knf.OnlineFbank(options)
            fbank.accept_waveform(RATE, (wave * 32768).tolist())
            fbank.input_finished()
            _ = [fbank.get_frame(i) for i in range(fbank.num_frames_ready)]

    rivals = {
        "starling, batched": lambda: ours(waves, lengths),
        "starling, one at a time": lambda: [ours(wave[None], lengths[:1]) for wave in waves],
        "torchaudio.compliance.kaldi": lambda: [
            torchaudio.compliance.kaldi.fbank(wave[None] * 32768, num_mel_bins=80, dither=0.0) for wave in waves
        ],
        "kaldi-native-fbank": native,
    }
    hours = COUNT * SECONDS / 3600
    show("log-mel, 80 filters", compare(rivals), "starling, batched", "hours of audio / s", hours)


if __name__ == "__main__":
    main()
