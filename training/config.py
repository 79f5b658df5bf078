"""Configuration of training: strategy, nodes, optimizer, schedule, batches, checkpoints, and when to stop."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configurable.choices import Choice, OneOf
from configurable.configuration import Configuration
from training.coordinator.config import MembershipConfig
from training.exchange.config import ExchangeConfig
from training.learner.sampling import SamplingConfig
from training.strategies.gossip import GossipConfig
from training.strategies.registry import STRATEGY_CONFIGS
from training.strategies.strategy import StrategyConfig, Traits
from training.strategies.synchronous import SingleConfig


class OptimizerConfig(Choice):
    """Options of all optimizers."""

    lr: float = Field(default=2e-3, gt=0)
    """Learning rate for a batch of `reference_batch` utterances (the published recipe's `base`)."""
    weight_decay: float = Field(default=1e-2, ge=0)
    """Weight decay; not applied to biases and normalization gains."""
    clip_norm: float = Field(default=5.0, ge=0)
    """Gradients are scaled down to this global L2 norm; 0 never clips."""


class AdamWConfig(OptimizerConfig):
    """AdamW (arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running moments."""


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum, as in the published recipes."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum; 0 is plain SGD."""


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamWConfig, "sgd": SgdConfig}
"""Optimizers by kind; `training.learner.optim` builds them."""


class ScheduleConfig(Configuration):
    """Learning rate over training, as a function of the epochs trained (fractions included)."""

    kind: Literal["published", "cosine", "constant"] = "published"
    """`published` (arXiv:1904.04956): linear warm-up, a plateau, then `anneal` per epoch; `cosine`: warm-up, then half
    a cosine to zero; `constant`: warm-up, then constant."""
    epochs: int = Field(default=0, ge=0)
    """Epoch at which `cosine` reaches zero; 0: at the end of the training. With a number, a training that ends earlier
    is the first part of a longer one, and can be continued as such."""
    warmup_epochs: float = Field(default=1.0, ge=0)
    """Epochs of linear warm-up from zero to the peak (published for large batches: 10 of 16)."""
    hold_epochs: float = Field(default=10.0, ge=0)
    """Epoch after which `published` anneals (published: 10)."""
    anneal: float = Field(default=0.7071067811865476, gt=0, le=1)
    """Factor per epoch beyond `hold_epochs` (published: 1/sqrt(2))."""
    reference_batch: int = Field(default=0, ge=0)
    """The peak is `lr` x batch / this number of utterances (published: 256); 0 leaves `lr` unscaled."""

    @property
    def fixed(self) -> bool:
        """Whether the learning rate at a point of training is the same however many epochs follow."""
        return self.kind != "cosine" or self.epochs > 0


class FreezeConfig(Configuration):
    """Parameters that are not trained, or not from the start."""

    names: tuple[str, ...] = Field(min_length=1)
    """Patterns of parameters' names, such as `subsampling.*` or `layers.0.*`; `*` stands for any characters."""
    until: int = Field(default=0, ge=0)
    """They are trained after this many epochs; 0: never. What is never trained is neither exchanged nor in the
    optimizer."""


class LoraConfig(Configuration):
    """Low-rank adaptation (LoRA: Hu et al. 2021, arXiv:2106.09685): W + alpha / rank · B A, of which A and B are
    trained. All other weights that the training begins with are frozen."""

    rank: int = Field(default=8, ge=1, le=4096)
    """Rows of A and columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the product, divided by the rank."""
    modules: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Patterns of the names of linear, convolutional and recurrent layers that get adapters, such as `*attention*`;
    `*` stands for any characters."""


class LaunchConfig(Configuration):
    """Where the nodes run."""

    kind: Literal["local", "external", "prefect"] = "local"
    """`local`: all on this machine; `external`: `starling train --node-rank ...` under any launcher; `prefect`: each as
    a run of the `node` deployment on a work pool."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the coordinator; port 0 chooses a free one. A parameter server's processes use the next ports. Hosts
    other than loopback need the ring's key."""
    key_file: str = ""
    """File of the ring's key (`starling key FILE` creates one); empty creates a new key for each local run."""
    pool: str = "starling"
    """Prefect work pool of the `node` deployment, for `prefect`."""
    trusted_network: bool = False
    """The network between a node's machines (`machines_per_node`) is private: their learners communicate by NCCL or
    Gloo, which neither encrypt nor authenticate."""


class TrainConfig(Configuration):
    """How a network is trained, whatever it is."""

    strategy: Annotated[StrategyConfig, OneOf(STRATEGY_CONFIGS, "single")] = SingleConfig()
    """How learners work together. `single` is one process. One node of several learners: `scpsgd`, `onebit` and `d1d`
    average gradients, `sdpsgd`, `ma`, `bmuf` and `pairs` average weights, `pipeline` splits the layers. Several nodes
    of one learner: `adpsgd` averages weights with neighbours, `asgd` and `easgd` use a parameter server, `hogwild`
    shares memory. Several nodes of several learners: `h-adpsgd`. See docs/strategies.md."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Nodes in the ring (super-learners)."""
    learners_per_node: int = Field(default=1, ge=1, le=4096)
    """Learners of a node, which keep step with each other."""
    machines_per_node: int = Field(default=1, ge=1, le=4096)
    """Machines that each node's learners are spread over evenly; machines other than this one need
    `launch.trusted_network`."""
    exchange: ExchangeConfig = ExchangeConfig()
    """How nodes average their weights."""
    comm_hook: Literal["none", "bf16", "powersgd"] = "none"
    """How gradients travel within a node of `scpsgd` or `h-adpsgd`: uncompressed, or by PyTorch's hook of that name."""
    membership: MembershipConfig = MembershipConfig()
    """When nodes count as lost."""
    launch: LaunchConfig = LaunchConfig()
    """Where the nodes run."""
    epochs: int = Field(default=20, ge=0)
    """Passes over the training set; 0 makes a model of the weights that a training would begin with, as they are."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Stop after this much training time, restarts included, and keep the best model so far; 0 never stops early."""
    max_utterances: int = Field(default=0, ge=0)
    """Stop once this many utterances are trained, those of all epochs together, and keep the best model so far; 0 never
    stops early. The batch that reaches the number is trained whole, and so are those that other nodes have begun."""
    sampling: SamplingConfig = SamplingConfig()
    """How often an epoch draws each corpus, domain or language."""
    loader_threads: int = Field(default=1, ge=1, le=64)
    """Threads of each learner that read and decode ahead, and draw augmentation; their number does not change the order
    of utterances."""
    loader_processes: int = Field(default=0, ge=0, le=64)
    """Processes of each learner that load batches in place of the threads, each one batch at a time; 0 for threads.
    Threads share Python's interpreter lock with the training step; processes take memory for the set's index each."""
    max_unreadable: float = Field(default=0.05, ge=0, le=1)
    """Training stops if damaged shards hold a larger share of the training set; otherwise their utterances are left
    out."""
    batch_seconds: float = Field(default=160.0, gt=0)
    """Maximum seconds of audio in a batch over all learners, padding included: each learner gets an equal share of it,
    and exceeds that only for a single longer utterance."""
    max_batch: int = Field(default=64, ge=1)
    """Maximum number of utterances in a batch over all learners."""
    bucket_batches: int = Field(default=16, ge=1)
    """Size in batches of the buckets of shuffled utterances that are sorted by duration: larger buckets need less
    padding, smaller ones shuffle better."""
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, "adamw")] = AdamWConfig()
    """Optimizer and its constants."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over training."""
    accumulate: int = Field(default=1, ge=1, le=4096)
    """Micro-batches that a learner divides its part of a batch into. Their gradients are summed before the step, which
    takes less memory and changes the result only by rounding and by dropout's draws. Learners exchange once a step."""
    freeze: tuple[FreezeConfig, ...] = ()
    """Parameters that are not trained, or not from the start."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights that training begins with; they are merged into the model."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of the learning rate from a layer to the one below it (discriminative fine-tuning, arXiv:1801.06146, which
    uses 1/2.6; 0.8 to 0.95 is customary for transformers). The output layer has the factor 1."""
    new_lr: float = Field(default=1.0, gt=0)
    """Factor of the learning rate for parameters that do not begin with another model's weights: an output layer with
    new tokens, for example, and adapters."""
    average: int = Field(default=1, ge=1)
    """The final model averages the weights of this many epochs, those with the lowest validation loss."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of an exponential moving average of each learner's weights (Polyak averaging), 0.999 for example;
    0 keeps none. After t steps the decay is at most (1 + t) / (10 + t), so that the first weights are forgotten."""
    final: Literal["weights", "ema"] = "weights"
    """What is validated, chosen and averaged for the final model: the learners' weights, or their moving averages."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` uses a GPU if there is one."""
    amp: Literal["auto", "off", "bf16"] = "auto"
    """Mixed precision of forward and backward passes; `auto` is bf16 on a GPU and off on a CPU."""
    compile: bool = False
    """Compile the model's forward and backward pass (torch.compile with dynamic shapes): takes minutes at the start and
    needs a C++ compiler; intended for GPUs."""
    cuda_graphs: bool = False
    """On a GPU, replay the model's forward and backward pass from CUDA graphs, one for each of the few shapes that
    batches are padded to: a small model's step then no longer waits for the host. For nodes of one learner."""
    flat_bf16: bool = False
    """In mixed precision, convert all weights to bf16 at once before a pass, and their gradients back after it, instead
    of one by one: fewer operations to launch, with the same result. For nodes of one learner; has no effect in fp32."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the training step; 0 uses all cores but one, which is left for reading ahead and everything else.
    Results repeat bit for bit only with the same number."""
    checkpoint_steps: int = Field(default=200, ge=1)
    """Steps between checkpoints; there is also one at the end of every epoch."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    log_steps: int = Field(default=10, ge=1)
    """Steps between lines in the journal; fewer where steps are so slow that half a minute passes before."""
    learner_metrics: Literal["auto", "always", "never"] = "auto"
    """Whether MLflow gets the figures of each learner besides those of the training as a whole; `auto` up to eight
    learners. The journal has them in any case."""

    def engine_part(self) -> "TrainConfig":
        """The fields of this class alone, without those that derived ones add for a task."""
        return TrainConfig(**{name: getattr(self, name) for name in TrainConfig.model_fields})

    @property
    def learners(self) -> int:
        """Total number of learners."""
        return self.nodes * self.learners_per_node

    @property
    def loaders(self) -> int:
        """Number of batches that a learner loads at the same time."""
        return self.loader_processes or self.loader_threads

    @property
    def places(self) -> int:
        """Machines of all nodes, each with a process of `starling train --node-rank`."""
        return self.nodes * self.machines_per_node

    @property
    def servers(self) -> int:
        """Number of the parameter server's processes; 0 without one."""
        return int(getattr(self.strategy, "servers", 0))

    @property
    def gossip(self) -> GossipConfig:
        """How nodes average with neighbours; the defaults if the strategy does not."""
        return self.strategy if isinstance(self.strategy, GossipConfig) else GossipConfig()

    @property
    def traits(self) -> Traits:
        """What the strategy requires."""
        return self.strategy.traits

    @model_validator(mode="after")
    def _check_number_of_learners(self) -> "TrainConfig":
        if self.traits.one_node and self.nodes > 1:
            raise ValueError(
                f"nodes is {self.nodes} but {self.strategy.kind} has one node: use nodes=1, or adpsgd "
                "(machines_per_node spreads the learners of a node over several machines)"
            )
        if self.traits.one_learner and self.learners_per_node > 1:
            other = "scpsgd" if self.traits.one_node else "h-adpsgd"
            raise ValueError(
                f"learners_per_node is {self.learners_per_node} but {self.strategy.kind} has nodes of one: use "
                f"learners_per_node=1, or {other}"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> "TrainConfig":
        if self.schedule.kind == "cosine" and 0 < self.schedule.epochs < self.epochs:
            raise ValueError(
                f"schedule.epochs is {self.schedule.epochs}, and {self.epochs} epochs are trained: the learning rate "
                f"would be zero before the end. Use schedule.epochs={self.epochs}, or 0"
            )
        return self

    @model_validator(mode="after")
    def _check_machines(self) -> "TrainConfig":
        if self.learners_per_node % self.machines_per_node:
            raise ValueError(
                f"learners_per_node is {self.learners_per_node} and machines_per_node {self.machines_per_node}: every "
                "machine has equally many learners, so use a multiple"
            )
        if self.machines_per_node > 1 and self.launch.kind != "local" and not self.launch.trusted_network:
            raise ValueError(
                f"machines_per_node is {self.machines_per_node}, and the learners of a node communicate by NCCL or "
                "Gloo, without encryption or a key: use a private network and confirm it with "
                "launch.trusted_network=true, or use machines_per_node=1 with h-adpsgd or adpsgd"
            )
        return self

    @model_validator(mode="after")
    def _check_exchange(self) -> "TrainConfig":
        if self.exchange.daemons > 1 and self.gossip.newcomer != "weights":
            raise ValueError(
                f"exchange.daemons is {self.exchange.daemons}, but newcomers get the optimizer's state from a single "
                "daemon only: use strategy.newcomer=weights, or daemons=1"
            )
        if self.exchange.kind == "cuda" and (self.launch.kind != "local" or self.device == "cpu"):
            raise ValueError(
                "exchange.kind cuda is for learners on GPUs of one machine (launch.kind=local), and this is "
                f"launch.kind={self.launch.kind}, device={self.device}: use exchange.kind=zmq"
            )
        if self.comm_hook != "none" and not self.traits.buckets:
            able = " or ".join(kind for kind, cfg in STRATEGY_CONFIGS.items() if cfg.traits.buckets)
            raise ValueError(
                f"comm_hook is {self.comm_hook} but {self.strategy.kind} does not all-reduce gradients by buckets: use "
                f"comm_hook=none, or {able}"
            )
        return self

    @model_validator(mode="after")
    def _check_trained_part(self) -> "TrainConfig":
        kind, traits = self.strategy.kind, self.traits
        thaws = any(rule.until for rule in self.freeze)
        if self.lora and thaws:
            raise ValueError(
                "lora trains adapters instead of the weights it begins with, so none of these thaw: use freeze without "
                "until, or leave out lora"
            )
        if late := [rule.until for rule in self.freeze if rule.until >= max(1, self.epochs)]:
            raise ValueError(
                f"freeze.until is {late[0]} of {self.epochs} epochs, so these parameters would never be trained: leave "
                "out until, or train for more epochs"
            )
        for name, used in {"freeze": self.freeze, "lora": self.lora, "ema": self.ema}.items():
            if used and traits.split:
                raise ValueError(f"{name} needs the whole model, which {kind} splits: use another strategy")
        if self.accumulate > 1 and traits.split:
            raise ValueError(f"{kind} divides batches by strategy.micro_batches: use that instead of accumulate")
        for name, used in {"freeze.until": thaws, "ema": self.ema}.items():
            if used and not traits.own_updates:
                raise ValueError(f"{name} is up to learners, and {kind} makes updates at a server: use easgd or adpsgd")
        if self.final == "ema" and not self.ema:
            raise ValueError("final is ema, and no moving average is kept: set ema, to 0.999 for example")
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> "TrainConfig":
        if self.compile and self.traits.split:
            raise ValueError(f"compile is for whole models, and {self.strategy.kind} splits them: use compile=false")
        several = f"is for nodes of one learner, and learners_per_node is {self.learners_per_node}: their gradients are"
        if self.cuda_graphs and self.learners_per_node > 1:
            raise ValueError(
                f"cuda_graphs {several} averaged during the backward pass, which a graph does not repeat; use "
                "cuda_graphs=false"
            )
        if self.flat_bf16 and self.learners_per_node > 1:
            raise ValueError(
                f"flat_bf16 {several} averaged during the backward pass, and these would come after it; use "
                "flat_bf16=false"
            )
        if self.cuda_graphs and self.compile:
            raise ValueError("cuda_graphs and compile both record the model: use one of them")
        return self

    @model_validator(mode="after")
    def _check_shared(self) -> "TrainConfig":
        if self.traits.shared and self.launch.kind != "local":
            raise ValueError(
                f"{self.strategy.kind} shares one machine's memory (launch.kind=local), not {self.launch.kind}: use "
                "local, or adpsgd"
            )
        if self.traits.shared and self.device == "cuda":
            raise ValueError(f"{self.strategy.kind} shares weights in main memory: use device=cpu, or adpsgd")
        return self
