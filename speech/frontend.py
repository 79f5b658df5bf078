"""Computes the normalized input features of an acoustic model from waveforms or stored features."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from devices.transfers import beside
from speech.features import FeatureConfig, build_features
from speech.features.cmvn import CmvnStats, frame_mask, normalize, utterance_stats
from speech.features.expand import Expand
from speech.features.sliding import MIN_WINDOW, sliding_normalize

Augment = Callable[[Tensor, Tensor], Tensor]
"""Augments normalized features: takes features [batch, frames, F] and frame counts [batch], returns features."""


_SILENCE, _KEPT = 5, 4
"""Frames before the first and after the last loud frame of a trimmed utterance; how many of them are its own."""
_PADDING = 12
"""Frames of zeros added at both ends before trimming, so that the first and last samples lie in full frames, too."""


class FrontEnd(nn.Module):
    """Features, mean and variance normalization, deltas, splicing and stride, on the device of the input.

    Args:
        cfg: Configuration of features and normalization.
        sample_rate: Sample rate of the waveforms in Hz.
        stats: Statistics of the training set; needed for `cmvn: global`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    def __init__(
        self,
        cfg: FeatureConfig,
        sample_rate: int,
        stats: CmvnStats | None = None,
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        super().__init__()
        if cfg.cmvn == "global" and stats is None:
            raise ValueError("features.cmvn is 'global' but there are no statistics: run the features stage first")
        self.cfg = cfg
        self.sample_rate = sample_rate
        self.extract = build_features(cfg, sample_rate)
        if stats is not None and stats.dim != self.extract.dim:
            raise ValueError(
                f"the statistics are of {stats.dim} features, but there are {self.extract.dim}: compute them again"
            )
        self.expand = Expand(cfg)
        self.stats = stats
        self.speakers = dict(speakers or {})
        self._places = {name: place for place, name in enumerate(self.speakers)}
        self._tables: dict[tuple[str, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def dim(self) -> int:
        """Number of features per frame that the model receives."""
        return int(self.extract.dim) * self.cfg.frame_factor

    def forward(
        self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None, augment: Augment | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute normalized features, zero in the padding.

        Args:
            inputs: Waveforms [batch, samples] in ±1, or stored features [batch, frames, F].
            lengths: Samples or frames of each utterance [batch].
            speakers: Speaker of each utterance, for `cmvn: speaker`.
            augment: Applied to the normalized features before deltas and splicing, which would otherwise leak
                neighbouring frames into a masked one.

        Returns:
            Features [batch, frames, dim] and frame counts [batch].
        """
        feats, frames = self._unnormalized(inputs, lengths)
        feats = self.normalized(feats, frames, speakers)
        if augment is not None:
            feats = augment(feats, frames)
        expanded: tuple[Tensor, Tensor] = self.expand(feats, frames)
        return expanded

    def num_frames(self, lengths: Tensor, stored: bool = False) -> Tensor:
        """Frames of each utterance that `forward` gives [batch], on the device of the lengths.

        Args:
            lengths: Samples of each utterance [batch], or frames if they are stored.
            stored: Whether the inputs are stored features.
        """
        return self.expand.num_frames(lengths if stored else self.extract.num_frames(lengths))

    def trimmed(
        self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute features for recognition: like `forward`, with the same short silence before and after the speech.

        Longer silence is trimmed, missing silence is added. `features.trim_db` defines silence; 0 disables trimming.

        Args:
            inputs: As in `forward`.
            lengths: As in `forward`.
            speakers: As in `forward`.

        Returns:
            Features [batch, frames, dim], frame counts [batch], and the start time of the first frame within the
            recording in seconds [batch], negative if silence was added before it.
        """
        if not self.cfg.trim_db:
            feats, frames = self(inputs, lengths, speakers)
            return feats, frames, torch.zeros(len(lengths))
        raw, frames = self._padded(inputs, lengths)
        feats = self.normalized(raw, frames, speakers)
        feats, frames, start = _trim_silence(feats, frames, self.extract.loud_frames(raw, frames, self.cfg.trim_db))
        feats, frames = self.expand(feats, frames)
        return feats, frames, (start.cpu() - _PADDING) * (self.cfg.hop_ms / 1000)

    def _unnormalized(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Unnormalized features and frame counts."""
        return (inputs, lengths) if inputs.ndim == 3 else self.extract(inputs, lengths)

    def _padded(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Unnormalized features and frame counts of the utterances, padded with digital silence at both ends."""
        size = self.extract.hop_length * _PADDING
        if inputs.ndim == 2:
            waves = inputs.masked_fill(~frame_mask(lengths, inputs.shape[1], inputs.device), 0.0)
            padded: tuple[Tensor, Tensor] = self.extract(nn.functional.pad(waves, (size, size)), lengths + 2 * size)
            return padded
        silence = self.cfg.silence(self.extract, inputs, lengths)
        feats = torch.where(frame_mask(lengths, inputs.shape[1], inputs.device).unsqueeze(2), inputs, silence)
        edge = silence.expand(inputs.shape[0], _PADDING, -1)
        return torch.cat([edge, feats, edge], dim=1), lengths + 2 * _PADDING

    def normalized(self, feats: Tensor, frames: Tensor, speakers: Sequence[str] | None = None) -> Tensor:
        """Normalized features, zero in the padding; arguments as for `forward`, of features as they are extracted."""
        cfg = self.cfg
        if cfg.cmvn == "none":
            return feats
        if cfg.cmvn == "sliding":
            return sliding_normalize(
                feats,
                frames,
                window=cfg.cmvn_window,
                center=cfg.cmvn_center,
                variance=cfg.cmvn_variance,
                counted=self.extract.speech_frames(feats, frames),
                floor=cfg.cmvn_floor,
            )
        mean, std = self._statistics(feats, frames, speakers)
        if cfg.cmvn_floor:
            lowest = mean - cfg.cmvn_floor * std
            feats = feats.maximum(lowest if lowest.ndim == 1 else lowest.unsqueeze(1))
        return normalize(feats, frames, mean, std if cfg.cmvn_variance else torch.ones_like(std))

    def _statistics(self, feats: Tensor, frames: Tensor, speakers: Sequence[str] | None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the training set [F] or for each utterance [batch, F]."""
        if self.cfg.cmvn == "global" and self.stats is not None:
            mean, std = self._vectors("global", [self.stats], feats)
            return mean[0], std[0]
        mean, std = utterance_stats(feats, frames, self.extract.speech_frames(feats, frames))
        if self.cfg.cmvn == "speaker" and speakers is not None:
            # speakers without statistics (new recordings) fall back to the utterance's own
            known = [(i, self._places[name]) for i, name in enumerate(speakers) if name in self._places]
            if known:
                rows, places = beside(torch.tensor(known), feats).T
                means, stds = self._vectors("speaker", self.speakers.values(), feats)
                mean[rows], std[rows] = means[places], stds[places]
        return mean, std

    def _vectors(self, kind: str, stats: Iterable[CmvnStats], like: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations [statistics, F] on the device and in the dtype of `like`; cached."""
        key = kind, like.device, like.dtype
        if key not in self._tables:
            with torch.inference_mode(False):  # they may be used for training later
                pairs = [(torch.as_tensor(cmvn.mean), torch.as_tensor(cmvn.std)) for cmvn in stats]
                mean, std = (torch.stack(column).to(like) for column in zip(*pairs, strict=True))
            self._tables[key] = mean, std
        return self._tables[key]


def _trim_silence(feats: Tensor, frames: Tensor, loud: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trim each utterance to its loud part plus `_SILENCE` frames at both ends.

    Args:
        feats: Normalized features [batch, frames, F]; each utterance starts with digital silence.
        frames: Frames of each utterance [batch].
        loud: Mask of the loud frames [batch, frames].

    Returns:
        Features, zero in the padding; frame counts [batch]; and the index of the first frame [batch].
    """
    total, places = feats.shape[1], torch.arange(feats.shape[1], device=feats.device)
    frames = frames.to(feats.device)
    some = loud.any(1)  # utterances without a loud frame (NaN) are not trimmed
    first = torch.where(some, loud.int().argmax(1), 0)
    end = torch.where(some, total - loud.flip(1).int().argmax(1), frames)
    own = (places >= (first - _KEPT).unsqueeze(1)) & (places < (end + _KEPT).unsqueeze(1))
    feats = torch.where(own.unsqueeze(2), feats, feats[:, :1])
    start = (first - _SILENCE).clamp(min=0)
    counts = (end + _SILENCE).minimum(frames) - start
    # a tensor, not a number, which would be a constant of graphs that are traced (`recognition.onnx_graphs`)
    longest = cast(int, counts.max()) if len(counts) else 0
    index = (start.unsqueeze(1) + torch.arange(longest, device=feats.device)).clamp(max=total - 1)
    feats = feats.gather(1, index.unsqueeze(2).expand(-1, -1, feats.shape[2]))
    inside = frame_mask(counts, feats.shape[1], feats.device)
    return feats.masked_fill(~inside.unsqueeze(2), 0.0), counts, start


class FeatureStream:
    """The features of `FrontEnd.forward` of one utterance whose samples come one after another.

    It keeps what later frames still read: less than a frame of samples, the window of `cmvn: sliding`, and the frames
    that deltas and splicing look back and ahead.

    Args:
        frontend: Computes the features.

    Raises:
        ValueError: The features of a frame depend on the whole utterance; the message names the field and the remedy.
    """

    def __init__(self, frontend: FrontEnd) -> None:
        cfg = frontend.cfg
        if reason := cfg.whole_utterance:
            raise ValueError(f"speech cannot be recognized as it comes: {reason}")
        self._frontend, self._stride = frontend, cfg.stride
        self._expand = Expand(cfg.model_copy(update={"stride": 1}))
        sliding = cfg.cmvn == "sliding"
        # behind so many frames, a window does not reach the first one that is kept, nor is it a first, smaller one
        history = max(cfg.cmvn_window, MIN_WINDOW) if sliding else 0
        self._raw = _Kept(history, MIN_WINDOW if sliding else 0, 0)
        self._normalized = _Kept(self._expand.reach[0], 0, self._expand.reach[1])
        self._wave = torch.zeros(0)
        self._given = self._skipped = self._passed = 0

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        kept = (self._wave, self._raw.frames, self._normalized.frames)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept if tensor is not None)

    def samples_for(self, frames: int) -> int:
        """The fewest samples from which `accept` can compute the first `frames` frames, at least 1."""
        extract = self._frontend.extract
        raw = self._raw.frames_for(self._normalized.frames_for((frames - 1) * self._stride + 1))
        return (raw - 1) * extract.hop_length + extract.frame_length - self._frontend.cfg.lead(extract)

    def accept(self, samples: Tensor) -> Tensor:
        """The frames [frames, dim] that can be computed by now, after further samples [samples] in ±1."""
        return self._expanded(self._extracted(samples, last=False), last=False)

    def finish(self) -> Tensor:
        """The last frames [frames, dim]: nothing follows."""
        return self._expanded(self._extracted(self._wave[:0], last=True), last=True)

    def _extracted(self, samples: Tensor, last: bool) -> Tensor:
        """Frames that are complete, not normalized [frames, F].

        What is kept of the samples begins early enough that no frame to come reads before it, where `waves_before`
        extends it as if the utterance began there.
        """
        extract = self._frontend.extract
        skipped = min(self._skipped, len(samples))  # between two frames that do not touch each other
        self._skipped -= skipped
        wave = torch.cat((self._wave.to(samples), samples[skipped:]))
        feats, frames = extract(wave[None], torch.tensor([len(wave)]))
        hop, lead, given = extract.hop_length, self._frontend.cfg.lead(extract), self._given
        inside = (len(wave) + lead - extract.frame_length) // hop + 1
        ready = max(given, int(frames) if last else min(inside, int(frames)))
        kept = max(0, ready - -(-lead // hop))
        self._wave, self._given = wave[kept * hop :].clone(), ready - kept
        self._skipped += max(0, kept * hop - len(wave))
        own: Tensor = feats[0, given:ready]
        return own

    def _expanded(self, feats: Tensor, last: bool) -> Tensor:
        """Normalized frames with deltas, splicing and stride."""
        feats = self._raw.mapped(feats, last, self._normalize)
        feats = self._normalized.mapped(feats, last, self._with_neighbours)
        first = -self._passed % self._stride
        self._passed += len(feats)
        return feats[first :: self._stride]

    def _normalize(self, feats: Tensor) -> Tensor:
        return self._frontend.normalized(feats[None], torch.tensor([len(feats)]))[0]

    def _with_neighbours(self, feats: Tensor) -> Tensor:
        expanded: Tensor = self._expand(feats[None], torch.tensor([len(feats)]))[0]
        return expanded[0]


class _Kept:
    """The last frames of a stream, for functions of frames that look back and ahead.

    Args:
        before: Frames that a frame's value depends on before it.
        first: Frames that must be there before the first value.
        after: Frames that a frame's value depends on after it.
    """

    def __init__(self, before: int, first: int, after: int) -> None:
        self._before, self._first, self._after = before, first, after
        self.frames: Tensor | None = None
        self._done = 0

    def frames_for(self, values: int) -> int:
        """The fewest frames from which `mapped` can compute the first `values` values, at least 1."""
        return max(values + self._after, self._first)

    def mapped(self, frames: Tensor, last: bool, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Values that can be computed by now.

        Args:
            frames: Further frames [frames, F].
            last: Whether no more will come.
            function: Values [T, ...] of frames [T, F] as if these were all.
        """
        if self.frames is not None:
            frames = torch.cat((self.frames, frames))
        ready = len(frames) - (0 if last else self._after)
        if not last and not self._done and len(frames) < self._first:
            ready = 0
        ready = max(ready, self._done)
        values = function(frames if ready > self._done else frames[:1])[self._done : ready]
        start = max(0, ready - self._before)
        self.frames, self._done = frames[start:].clone(), ready - start
        return values
