"""Recordings of passes on a CPU."""

import torch


class HostRecording:
    """Fixed memory as a CUDA graph has it, with the passes computed each time."""

    made: list[tuple[int, ...]] = []

    def __init__(self, run, feats, lengths):
        self._run, self.feats, self.lengths = run, feats.clone(), lengths.clone()
        torch.rand(7)  # a warm-up draws random numbers, and adds gradients
        scores, self.frames = run(self.feats, self.lengths)
        if scores.requires_grad:
            scores.backward(torch.ones_like(scores))
        self.scores, self.grads = scores.detach().clone(), torch.full_like(scores, torch.nan)
        self.made.append(tuple(feats.shape))

    def forward(self):
        with torch.enable_grad():  # inside an autograd function
            self._live, frames = self._run(self.feats, self.lengths)
        self.scores.copy_(self._live.detach())
        self.frames.copy_(frames)

    def backward(self):
        if self._live.requires_grad:
            self._live.backward(self.grads)
