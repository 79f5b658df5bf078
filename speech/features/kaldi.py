"""Filter banks by Kaldi's definitions, as a torch module for CPU and GPU; each kind of features has its formula.

Frames lie entirely inside the utterance (`snip_edges`). For each frame the mean is removed; then it is pre-emphasized,
windowed and zero-padded to a power of two. Mel filters are applied to the power spectrum; logarithms are floored at the
epsilon of float32. Samples are on the scale of 16-bit integers. Results agree with kaldi-native-fbank to 1e-3, except
where a filter's energy is so far below that of the frame that a float32 FFT cannot resolve it.

Features are computed during training, so speed matters. On a CPU, each utterance is processed separately, without its
padding, in chunks of frames that fit the cache; on a GPU, the padded batch is processed at once.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from devices.padding import frame_multiple
from speech.features.cmvn import loud_frames, tenth_loudest
from speech.features.config import FeatureConfig, FilterBankConfig
from speech.features.mel import FeatureError, mel_filter_bank, povey_window

_CPU_CHUNK_FRAMES = 1024  # 2 MB of padded float32 samples: fits the cache, and amortizes the cost of the calls
_GPU_CHUNK_FRAMES = 1 << 16  # about 0.5 GB of intermediate results
_INT16_SCALE = 32768.0
_LOUD_HZ = 500.0
_SILENT = 1e-12  # power of a frame in which there is nothing to amplify
_LARGEST_BANK = 1 << 24  # values of the filters: 128 MB in float64, thirty times what 48 kHz and 128 filters need
_EPSILON = torch.finfo(torch.float32).eps  # Kaldi's floor under logarithms


class FilterBank(nn.Module):
    """Features of any kind: cuts waveforms into frames, and has the steps that the kinds' formulas share.

    Args:
        config: configuration of the features.
        sample_rate: sample rate of the waveforms in Hz.

    Attributes:
        dim: number of features in a frame.
        frame_length: samples in a frame.
        hop_length: samples between the starts of two frames.

    Raises:
        FeatureError: the configuration is not possible at this sample rate.

    Example:
        >>> features = FilterBank(LogMelConfig(num_mels=40), sample_rate=16000)
        >>> frames, num_frames = features(torch.zeros(1, 16000), torch.tensor([16000]))
        >>> frames.shape, num_frames
        (torch.Size([1, 98, 40]), tensor([98]))
    """

    epsilon = _EPSILON
    window: Tensor
    filters: Tensor
    loudness: Tensor

    def __init__(self, config: FeatureConfig, sample_rate: int) -> None:
        super().__init__()
        self.config = config
        self.sample_rate = sample_rate
        self.dim = config.width
        self.frame_length = int(sample_rate * 0.001 * config.frame_ms)
        self.hop_length = int(sample_rate * 0.001 * config.hop_ms)
        if self.frame_length < 2 or self.hop_length < 1:
            raise FeatureError(
                f"frames of {config.frame_ms} ms every {config.hop_ms} ms are too short at {sample_rate} Hz: "
                f"raise features.frame_ms and features.hop_ms"
            )
        self._of_zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        if isinstance(config, FilterBankConfig):
            self._add_filters(config)
        for name, table in config.tables(sample_rate).items():
            self.register_buffer(name, table.float(), persistent=False)

    def of_zeros(self, like: Tensor) -> Tensor:
        """The features of a frame of zeros `[1, 1, dim]`, on the device and in the dtype of `like`; computed once."""
        key = like.device, like.dtype
        if key not in self._of_zeros:
            zeros = like.new_zeros(1, self.frame_length)
            self._of_zeros[key] = self(zeros, torch.tensor([self.frame_length]))[0][:, :1]
        return self._of_zeros[key]

    def _add_filters(self, config: FilterBankConfig) -> None:
        """Make the window, the filters, and their weights in the level of a frame."""
        sample_rate, self._preemphasis = self.sample_rate, config.preemphasis
        self.fft_size = 1 << (self.frame_length - 1).bit_length()
        count = 1 if config.adapted else config.num_mels  # adapted features are not computed here
        if self.fft_size * count > _LARGEST_BANK:
            raise FeatureError(
                f"{count} filters over frames of {config.frame_ms:g} ms at {sample_rate} Hz take more than "
                f"{_LARGEST_BANK} values: lower features.num_mels or features.frame_ms"
            )
        filters = mel_filter_bank(count, self.fft_size, sample_rate, config.low_freq, config.high_freq, config.scale)
        # Everything before the spectrum is linear, so the window includes the 16-bit scale (a power of two: exact).
        self.register_buffer("window", (povey_window(self.frame_length) * _INT16_SCALE).float(), persistent=False)
        self.register_buffer("filters", filters.float(), persistent=False)
        hz = torch.arange(len(filters), dtype=torch.float64) * sample_rate / self.fft_size
        centres = hz @ filters / filters.sum(0)
        self.register_buffer("loudness", -torch.log1p((centres / _LOUD_HZ).square()).float(), persistent=False)

    def speech_frames(self, feats: Tensor, lengths: Tensor) -> Tensor | None:
        """Mask of the frames used for CMVN statistics according to `cmvn_gate_db`: bool `[B, T]`; None for all frames.

        Args:
            feats: `[B, T, dim]`, computed or stored features, not normalized.
            lengths: `[B]`, frames of each utterance.
        """
        return self.loud_frames(feats, lengths, self.config.cmvn_gate_db) if self.config.cmvn_gate_db else None

    def speech_mask(self, feats: Tensor) -> Tensor:
        """Frames of one utterance used for CMVN statistics: bool `[T]`, all of them without `cmvn_gate_db`.

        Args:
            feats: `[T, dim]`, computed or stored features, not normalized.
        """
        mask = self.speech_frames(feats[None], torch.tensor([len(feats)]))
        return torch.ones(len(feats), dtype=torch.bool) if mask is None else mask[0]

    def loud_frames(self, feats: Tensor, lengths: Tensor, range_db: float) -> Tensor:
        """Mask of the frames within `range_db` of an utterance's loudest ones: bool `[B, T]`."""
        return loud_frames(self.config.levels(self, feats), lengths, range_db)

    def level(self, log_energies: Tensor) -> Tensor:
        """Natural logarithm of each frame's energy, weighted towards low frequencies, where speech is strong: `[B, T]`.

        The weights are those of a first-order low-pass filter at 500 Hz. At higher frequencies it compensates the
        pre-emphasis, which would raise white noise by ten decibels.
        """
        return torch.logsumexp(log_energies + self.loudness, dim=-1)

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Numbers of frames `[B]` of utterances of `lengths` samples; 0 if an utterance is shorter than a frame."""
        return self.config.num_frames(self, lengths)

    @torch.no_grad()
    def forward(self, waves: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the features of a padded batch.

        Args:
            waves: `[B, N]`, samples in [-1, 1]; samples beyond an utterance's length are ignored.
            lengths: `[B]`, number of samples of each utterance.

        Returns:
            Features float32 `[B, T, dim]`, zero beyond each utterance, with T the number of frames in N samples; and
            the number of frames of each utterance, `[B]`, on the device of `lengths`.

        Raises:
            ValueError: the shapes do not match, or (on a CPU) a length exceeds N.
        """
        if waves.dim() != 2 or lengths.shape != waves.shape[:1]:
            raise ValueError(f"need waves [B, N] and lengths [B], not {tuple(waves.shape)} and {tuple(lengths.shape)}")
        num_frames = self.num_frames(lengths)
        if self.config.level_db:
            waves = self._leveled(waves.float(), num_frames)
        total = int(self.num_frames(torch.tensor(waves.shape[1])))
        # The spectrum spans ten orders of magnitude: exclude it from mixed precision.
        with torch.autocast(waves.device.type, enabled=False):
            waves = self.config.waves_before(self, waves.float(), lengths)
            compute = self._each if waves.device.type == "cpu" else self._together
            return self.config.finished(compute(waves, num_frames, total), num_frames), num_frames

    def _leveled(self, waves: Tensor, num_frames: Tensor) -> Tensor:
        """Waveforms `[B, N]`, scaled so that the tenth loudest frame of each has `level_db`, whatever its offset."""
        if waves.shape[1] < self.frame_length:
            return waves
        pooled = torch.nn.functional.avg_pool1d(
            torch.stack([waves, waves.square()], dim=1), self.frame_length, self.hop_length
        )
        power = tenth_loudest(pooled[:, 1] - pooled[:, 0].square(), num_frames)
        gains = (10 ** (self.config.level_db / 10) / power.clamp(min=_SILENT)).sqrt()
        return waves * torch.where(power > _SILENT, gains, 1.0)

    def traceable(self, waves: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, all frames at once and in operations that have a form in ONNX."""
        num_frames = self.num_frames(lengths)
        if self.config.level_db:
            waves = self._leveled(waves, num_frames)
        # a tensor: a number would be a constant of the graph
        total = cast(int, self.num_frames(torch.as_tensor(waves.shape[1])))
        waves = self.config.waves_before(self, waves, lengths)
        places = torch.arange(total)
        starts = places * self.hop_length
        frames = waves[:, starts.unsqueeze(1) + torch.arange(self.frame_length)]
        padding = places >= num_frames.unsqueeze(1)
        feats = self.config.compute(self, frames).masked_fill(padding.unsqueeze(2), 0.0)
        return self.config.finished(feats, num_frames), num_frames

    def _each(self, waves: Tensor, num_frames: Tensor, total: int) -> Tensor:
        counts = num_frames.tolist()
        if counts and max(counts) > total:
            raise ValueError(f"lengths must not exceed the {waves.shape[1]} samples of the batch")
        features = waves.new_zeros(len(waves), total, self.dim)
        for wave, count, out in zip(waves, counts, features, strict=True):
            self._fill(wave, out[:count], _CPU_CHUNK_FRAMES)
        return features

    def _together(self, waves: Tensor, num_frames: Tensor, total: int) -> Tensor:
        # cuFFT plans, and keeps, a transform for each number of frames
        multiple = frame_multiple(waves.device)
        extra = -total % multiple
        waves = torch.nn.functional.pad(waves, (0, extra * self.hop_length)) if extra else waves
        chunk = _GPU_CHUNK_FRAMES // max(1, len(waves)) // multiple * multiple
        features = waves.new_empty(len(waves), total + extra, self.dim)
        self._fill(waves, features, max(multiple, chunk))
        padding = torch.arange(total, device=waves.device) >= num_frames.to(waves.device).unsqueeze(1)
        return features[:, :total].masked_fill_(padding.unsqueeze(2), 0.0)

    def _fill(self, waves: Tensor, out: Tensor, chunk: int) -> None:
        """Compute the features of `waves` `[..., N]` into `out` `[..., T, dim]`, `chunk` frames at a time."""
        total = out.shape[-2]
        if total == 0:
            return
        frames = waves.unfold(-1, self.frame_length, self.hop_length)
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            out[..., start:stop, :] = self.config.compute(self, frames[..., start:stop, :])

    def dithered(self, frames: Tensor) -> Tensor:
        """Frames with dither."""
        if self.config.dither:
            frames = frames + torch.randn_like(frames) * (self.config.dither / _INT16_SCALE)
        return frames

    def centred(self, frames: Tensor) -> Tensor:
        """Frames with dither and without their mean."""
        frames = self.dithered(frames)
        return frames - frames.mean(-1, keepdim=True)

    def energies(self, centred: Tensor) -> Tensor:
        """Centred frames `[..., frame_length]` to the filters' energies `[..., num_mels]`."""
        spectrum = torch.view_as_real(torch.fft.rfft(self._windowed(centred)))
        power = spectrum[..., 0].square().addcmul_(spectrum[..., 1], spectrum[..., 1])
        return torch.matmul(power, self.filters)

    def _windowed(self, centred: Tensor) -> Tensor:
        """Centred frames, pre-emphasized, windowed and padded with zeros `[..., fft_size]`."""
        size, coefficient = self.frame_length, self._preemphasis
        if torch.onnx.is_in_onnx_export():  # parts of a tensor that are written in place have no form in ONNX
            changes = torch.cat([centred[..., :1], centred[..., :-1]], dim=-1)
            return torch.nn.functional.pad((centred - coefficient * changes) * self.window, (0, self.fft_size - size))
        padded = centred.new_empty(*centred.shape[:-1], self.fft_size)
        padded[..., size:] = 0.0
        padded[..., 0] = centred[..., 0] * (1.0 - coefficient)  # as in Kaldi, the first sample is its own predecessor
        torch.sub(centred[..., 1:], centred[..., :-1], alpha=coefficient, out=padded[..., 1:size])
        padded[..., :size].mul_(self.window)
        return padded

    @staticmethod
    def log_energy(centred: Tensor) -> Tensor:
        """Log energy of centred frames, before pre-emphasis and window (Kaldi's `--raw-energy`): `[..., 1]`."""
        energy = centred.square().sum(-1, keepdim=True).mul_(_INT16_SCALE**2)
        return energy.clamp_(min=_EPSILON).log_()

    @staticmethod
    def log(energies: Tensor) -> Tensor:
        """Logarithms, floored; in place."""
        return energies.clamp_(min=_EPSILON).log_()
