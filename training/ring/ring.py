"""The training engine for any model: `Ring` averages a model's weights with those of other learners.

    with Ring(model, optimizer, folder="run1") as ring:
        for epoch, shard, rows in ring.leases(counts, epochs=10):
            optimizer.zero_grad()
            loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()

Every process that runs this is a learner. Learners may join and end at any time, by SIGKILL too. The engine is that of
the pipeline's strategies `adpsgd` and `h-adpsgd` (arXiv:1710.06952, 1907.05701): an exchange in a process of its own
averages weights with neighbours while gradients are computed, and the coordinator keeps membership and leases.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from training.coordinator.core import Settings
from training.coordinator.epochs import ShardMap
from training.coordinator.messages import NamedData
from training.coordinator.node_client import NodeClient
from training.coordinator.node_state import COORDINATOR_LOST
from training.coordinator.server import open_server
from training.coordinator.worklist import Assignment
from training.learner.flat import FlatParameters
from training.learner.moments import Moments
from training.processes.children import on_termination
from training.ring.config import RingConfig
from training.ring.folder import ring_job
from training.ring.learner import RingError, RingLearner
from training.ring.leases import LeasedRows, PiecePlanner, named_data


class Ring:
    """Averages a model's weights with those of other learners, and leases them the rows of a data set.

    As a context it works at every `optimizer.step()`; otherwise call `before_step` and `after_step` around it, and
    `close` at the end. Under torchrun, the processes of one agent are one node: their gradients are averaged at every
    step, and each node averages its weights with other nodes.

    Args:
        model: The model, on its device. Its parameters become views of one buffer, so move or rebuild it before. Its
            float32 buffers (running statistics) are averaged, too.
        optimizer: Optimizer of its parameters. Newcomers get its state if it is SGD, Adam or AdamW of torch.
        folder: Folder of a ring on this machine, shared by its learners; the first one starts the coordinator.
        address: HOST:PORT of a coordinator that `Ring.serve` runs, instead of a folder.
        key: File of that coordinator's key; None for a coordinator on this machine that runs without a key.
        learners: Nodes to wait for at the start of training, for at most `membership.start_patience_s`.
        config: Everything else.

    Raises:
        ValueError: If an argument is invalid, or a key file cannot be used.
        CoordinatorUnreachableError: If the coordinator does not answer.
        ExchangeError: If the exchange does not start.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        folder: str | Path | None = None,
        address: str = "",
        key: str | Path | None = None,
        learners: int = 1,
        config: RingConfig | None = None,
    ) -> None:
        if bool(address) == (folder is not None):
            raise ValueError("give Ring either a folder (learners on this machine) or the address of a coordinator")
        _check_model(model)
        self._config, self._optimizer = config or RingConfig(), optimizer
        flat = FlatParameters(model)
        place, key_file = Path(folder) if folder is not None else address, Path(key) if key is not None else None
        moments = Moments(optimizer, flat)
        self._learner = RingLearner(flat, moments, self._config, place, key_file, learners)
        self._leasing, self._hooked, self._weight = False, False, 1.0
        self._hooks = ExitStack()

    @staticmethod
    def serve(
        listen: str,
        folder: str | Path,
        key: str | Path | None = None,
        *,
        config: RingConfig | None = None,
        fresh: bool = False,
    ) -> None:
        """Run a ring's coordinator until SIGTERM or SIGINT; call this in the main thread of a process of its own.

        It may be killed and started again with the same folder: learners go on meanwhile.

        Args:
            listen: HOST:PORT; hosts other than loopback need a key.
            folder: Folder of its state and of the journal.
            key: File of the ring's key, which every learner needs (`starling key FILE` makes one).
            config: Membership and seed of the ring.
            fresh: Start another training; otherwise one that is in the folder is continued.

        Raises:
            ValueError: If the address or the key cannot be used.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        settings = Settings.from_job(ring_job(place, config or RingConfig()))
        server = open_server(settings, place, listen, Path(key) if key else None, fresh)
        on_termination(server.stop)
        server.run()

    # --- steps

    @property
    def node(self) -> int:
        """This node's number in the ring."""
        return self._learner.ring.node

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the nodes in the ring, as last heard."""
        return self._learner.ring.view.nodes

    @property
    def steps(self) -> int:
        """Steps that this node has made."""
        return self._learner.step - self._learner.looks

    def before_step(self) -> None:
        """Call this between `backward` and `optimizer.step`: applies the averages that have arrived.

        Raises:
            RingError: Within the context, where every `optimizer.step` does it.
        """
        self._refuse_if_hooked()
        self._before()

    def after_step(self) -> None:
        """Call this after `optimizer.step`: offers the new weights to the neighbours.

        Raises:
            RingError: Within the context, where every `optimizer.step` does it.
            ExchangeError: If this learner's exchange has died; the other learners go on without it.
        """
        self._refuse_if_hooked()
        self._after()

    def _refuse_if_hooked(self) -> None:
        if self._hooked:
            raise RingError("within `with Ring(...)` every optimizer.step() does this: do not call it")

    def _before(self, *_: object) -> None:
        if not self._learner.joined:
            self._learner.join()
            self._optimizer.zero_grad()  # the gradient was not computed with a neighbour's weights
        self._learner.reduce(self._weight)
        self._learner.average()

    def _after(self, *_: object) -> None:
        self._learner.after_step()
        if not self._leasing:
            self._learner.follow()

    # --- data

    def leases(self, counts: Sequence[int], *, epochs: int = 1, batch: int = 64) -> Iterator[LeasedRows]:
        """Rows to train next, until all learners together have trained every row once an epoch.

        A piece of rows counts as trained when the next one is asked for. Rows of a learner that dies are leased to
        others; those that it had started may be trained twice, which the journal counts.

        Args:
            counts: Rows of each shard; the same at all learners.
            epochs: Passes over the data set; the same at all learners.
            batch: Maximum number of rows of a piece, over all learners of a node.

        Raises:
            ValueError: If an argument is invalid, or other learners have given others.
            RingError: If steps were made before, or the coordinator is lost.
        """
        data = named_data(counts, epochs)
        if batch < 1:
            raise ValueError(f"batch is {batch}: give at least 1")
        if self._learner.joined:
            raise RingError("call leases once, and before the first step")
        return self._lease(data, batch)

    def _lease(self, data: NamedData, batch: int) -> Iterator[LeasedRows]:
        learner, shards = self._learner, ShardMap.from_counts(data.counts)
        client = learner.client
        learner.train_on(data, PiecePlanner(shards, batch, self._config.seed))
        learner.join()
        self._leasing = True
        try:
            why = yield from self._pieces(client, shards)
        finally:
            self._leasing, self._weight = False, 1.0
        if why == COORDINATOR_LOST:
            patience_s = self._config.membership.coordinator_patience_s
            raise RingError(f"the coordinator has not answered for {patience_s:g} s: rows may be untrained")
        if why != "done":
            raise RingError(f"training has ended ({why}) before every row was trained")
        learner.settle()

    def _pieces(self, client: NodeClient | None, shards: ShardMap) -> Generator[LeasedRows, None, str]:
        """Rows to train next, until training has ended; returns why."""
        learner, work = self._learner, None
        group = learner.group
        while True:
            orders: dict[str, Any] = {}
            if client is not None:
                orders, work = self._decide(client)
            orders = group.tell(orders)
            if orders["do"] == "end":
                return str(orders["why"])
            if orders["do"] == "wait":
                learner.idle()
            else:
                rows = np.asarray(orders["rows"], dtype=np.int64)
                mine = rows[group.rank :: group.size]
                self._weight = float(len(mine))
                yield LeasedRows(int(orders["epoch"]), int(shards.shard_of_row[rows[0]]), mine)
                if client is not None and work is not None:
                    client.trained(work, loss_sum=0.0, tokens=0.0, utterances=len(rows))
            learner.follow()

    def _decide(self, client: NodeClient) -> tuple[dict[str, Any], Assignment | None]:
        """What the node does next, and its rows."""
        if (epoch := client.snapshot_wanted()) is not None:
            client.snapshot_written(epoch)  # for evaluators that read replicas; a ring has none
        if why := client.finish():
            return {"do": "end", "why": why}, None
        work = client.next()
        if work is None:
            return {"do": "wait"}, None
        return {"do": "step", "rows": work.rows.tolist(), "epoch": work.epoch}, work

    # --- the context

    def __enter__(self) -> Self:
        self._hooks.callback(self._optimizer.register_step_pre_hook(self._before).remove)
        self._hooks.callback(self._optimizer.register_step_post_hook(self._after).remove)
        self._hooked = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the ring; the model keeps its weights."""
        self._hooks.close()
        self._hooked = False
        self._learner.close()


def _check_model(model: nn.Module) -> None:
    """Check that a model can be trained here.

    Raises:
        ValueError: If no parameter is trainable, or the parameters are on several devices.
    """
    devices = {str(parameter.device) for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) != 1:
        named = " and ".join(sorted(devices)) or "none"
        raise ValueError(f"the model's trainable parameters must be on one device; found: {named}")
