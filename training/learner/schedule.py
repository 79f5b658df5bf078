"""Learning rate as a function of global progress, independent of how many steps each learner has made."""

import math

from training.config import ScheduleConfig


def learning_rate(cfg: ScheduleConfig, base: float, progress: float, epochs: int, batch: float = 0.0) -> float:
    """The learning rate at a point of training.

    `published` (arXiv:1904.04956, 1907.05701): linear warm-up to base x batch / reference over `warmup_epochs`,
    constant up to `hold_epochs`, then a factor of `anneal` at every epoch, the first one at `hold_epochs` itself.

    Args:
        cfg: Kind and constants.
        base: Learning rate for the reference batch.
        progress: Epochs trained so far, fractions included, over all learners.
        epochs: Total number of epochs.
        batch: Mean number of utterances in a global batch; used if `cfg.reference_batch` is set.
    """
    peak = base * batch / cfg.reference_batch if cfg.reference_batch else base
    if progress < cfg.warmup_epochs:
        return peak * progress / cfg.warmup_epochs
    if cfg.kind == "cosine":
        rest = max((cfg.epochs or epochs) - cfg.warmup_epochs, 1e-9)
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - cfg.warmup_epochs) / rest)))
    if cfg.kind == "published" and progress >= cfg.hold_epochs:
        return peak * cfg.anneal ** (math.floor(progress - cfg.hold_epochs) + 1)
    return peak
