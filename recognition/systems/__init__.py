"""Systems: what is trained, and what recognizes with it; a new one is one file and one line here."""

from typing import Annotated

from pydantic import BaseModel

from configurable.choices import OneOf
from recognition.system import SystemConfig
from recognition.systems.attention import AttentionSystem
from recognition.systems.ctc import CtcSystem
from recognition.systems.gmm import GmmSystem
from recognition.systems.hybrid import HybridSystem
from recognition.systems.language_model import LanguageModelTaskConfig
from recognition.systems.transducer import TransducerSystem
from speech.objectives import ObjectiveConfig

SYSTEMS: dict[str, type[SystemConfig]] = {
    "ctc": CtcSystem,
    "hybrid": HybridSystem,
    "gmm": GmmSystem,
    "attention": AttentionSystem,
    "transducer": TransducerSystem,
}
SystemOption = Annotated[SystemConfig | None, OneOf(SYSTEMS, "ctc", optional=True)]
"""A field that takes the configuration of any system, or None."""

_TASKS: list[type[BaseModel]] = [system.task_config for system in SYSTEMS.values() if system.task_config]
_TASKS.append(LanguageModelTaskConfig)
TASK_CONFIGS = {task.model_fields["kind"].default: task for task in _TASKS}
"""Tasks that the engine trains, by kind: those of the systems, and language models."""


def system_of(objective: ObjectiveConfig) -> SystemConfig:
    """The system that is trained with an objective, unless a configuration names another."""
    return next(system() for system in SYSTEMS.values() if objective.kind in system.objectives)
