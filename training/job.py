"""A training job: the complete configuration of a training process, as a JSON file."""

from pathlib import Path
from typing import Any, cast

from pydantic import Field, field_validator

from configurable.configuration import Configuration
from training.config import TrainConfig
from training.learner.task import TaskConfig, known_tasks


class TrainJob(Configuration):
    """What to train, on which data, and where to write the results."""

    run: str
    """Identity of the training: the digest of all its inputs. A resume must have the same."""
    seed: int
    """Seed of initialization, batch order, dropout and augmentation."""
    train: TrainConfig
    """How to train."""
    task: Any
    """What is trained, and on which data: a `TaskConfig`; as JSON in processes that do not know its kind."""
    output_url: str
    """Store for checkpoints and the finished model."""
    journal: Path
    """Local file that metrics are appended to."""
    cache: Path
    """Local folder for copies of remote shards."""
    servers: tuple[str, ...] = ()
    """HOST:PORT of the parameter server's processes, set by the supervisor that starts them."""
    cache_bytes: int | None = Field(default=None, gt=0)
    """Limit of the cache in bytes; None uses the folder's own limit."""

    @field_validator("task")
    @classmethod
    def _known(cls, value: Any) -> Any:
        config = known_tasks().get(str(value.get("kind"))) if isinstance(value, dict) else None
        return config.model_validate(value) if config else value

    @property
    def known_task(self) -> TaskConfig:
        """The task.

        Raises:
            ValueError: This process does not know its kind.
        """
        if isinstance(self.task, dict):
            raise ValueError(
                f"this process knows no task {self.task.get('kind')!r}: start it by a program that does, such as "
                "`python -m tasks.engine`"
            )
        return cast(TaskConfig, self.task)
