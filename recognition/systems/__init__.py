"""Systems: what is trained, and what recognizes with it; a new one is one file and one line here."""

from pydantic import BaseModel

from recognition.systems.acoustic import AcousticTaskConfig
from recognition.systems.language_model import LanguageModelTaskConfig

TASK_CONFIGS: dict[str, type[BaseModel]] = {
    "acoustic": AcousticTaskConfig,
    "language_model": LanguageModelTaskConfig,
}
"""Tasks that the engine trains, by kind."""
