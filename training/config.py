"""What one can choose about training: optimizer, schedule, batches, checkpoints, and where to stop."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from speech.features.augment import AugmentConfig

_MODEL_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class OptimizerConfig(BaseModel):
    """The optimizer and its constants."""

    model_config = _MODEL_CONFIG

    kind: Literal["adamw", "sgd"] = "adamw"
    """`adamw`, or `sgd` with momentum as in the published recipes."""
    lr: float = Field(default=2e-3, gt=0)
    """Learning rate for a batch of `reference_batch` utterances (the published recipe's `base`)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's running moments."""
    weight_decay: float = Field(default=1e-2, ge=0)
    """Weight decay; not applied to biases and normalization gains."""
    clip_norm: float = Field(default=5.0, ge=0)
    """Gradients are scaled down to this global L2 norm; 0 never clips."""


class ScheduleConfig(BaseModel):
    """Learning rate over training, as a function of the epochs trained (fractions included)."""

    model_config = _MODEL_CONFIG

    kind: Literal["published", "cosine", "constant"] = "published"
    """`published` (arXiv:1904.04956): linear warm-up, a plateau, then `anneal` per epoch; `cosine`: warm-up, then half
    a cosine to zero; `constant`: warm-up, then constant."""
    warmup_epochs: float = Field(default=1.0, ge=0)
    """Epochs of linear warm-up from zero to the peak (published for large batches: 10 of 16)."""
    hold_epochs: float = Field(default=10.0, ge=0)
    """Epoch after which `published` anneals (published: 10)."""
    anneal: float = Field(default=0.7071067811865476, gt=0, le=1)
    """Factor per epoch beyond `hold_epochs` (published: 1/sqrt(2))."""
    reference_batch: int = Field(default=0, ge=0)
    """The peak is `lr` x batch / this number of utterances (published: 256); 0 leaves `lr` unscaled."""


class TrainConfig(BaseModel):
    """Training of one acoustic model."""

    model_config = _MODEL_CONFIG

    strategy: Literal["single"] = "single"
    """How learners work together; `single` is one process."""
    epochs: int = Field(default=20, ge=1)
    """Passes over the training set."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Stop after this much training time and keep the best model so far, restarts counted in; 0 never stops early."""
    batch_seconds: float = Field(default=160.0, gt=0)
    """Seconds of audio in a batch, padding included: no batch exceeds this bound, long single utterances aside."""
    max_batch: int = Field(default=64, ge=1)
    """Utterances in a batch at most."""
    bucket_batches: int = Field(default=16, ge=1)
    """Batches' worth of shuffled utterances sorted by duration together: more pads less, less shuffles better."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and its constants."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over training."""
    augment: AugmentConfig = AugmentConfig()
    """What is done to training features and audio; never to validation or test."""
    average: int = Field(default=1, ge=1)
    """The final model averages the weights of this many epochs, those with the lowest validation loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes a GPU if there is one."""
    amp: Literal["auto", "off", "bf16"] = "auto"
    """Mixed precision of forward and backward passes; `auto` is bf16 on a GPU and off on a CPU."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the training step; 0 is one per core but one, which reads ahead and serves everything else.
    Results repeat bit for bit only with the same number."""
    checkpoint_steps: int = Field(default=200, ge=1)
    """A checkpoint is written every so many steps and at every epoch's end."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Checkpoints kept, the newest ones."""
    log_steps: int = Field(default=10, ge=1)
    """A line in the journal every so many steps."""
