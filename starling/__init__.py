"""Starling: speech recognition, from a corpus to a champion in the model registry.

The command is `starling` or `python -m starling`. The code is in the packages flows, tasks, training, speech and
storage; this one holds the version, the example configurations and the public names. Importing it imports none of the
others: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.models import fetch_model
    from flows.plain import run_pipeline
    from recognition.transcriber import Transcriber
    from tasks.config.pipeline import load_config, parse_config
    from training.ring.config import RingConfig
    from training.ring.learner import RingError
    from training.ring.ring import Ring

__all__ = [
    "Ring",
    "RingConfig",
    "RingError",
    "Transcriber",
    "__version__",
    "fetch_model",
    "load_config",
    "parse_config",
    "run_pipeline",
]
__version__ = "0.1.0"

_MODULES = {
    "Ring": "training.ring.ring",
    "RingConfig": "training.ring.config",
    "RingError": "training.ring.learner",
    "Transcriber": "recognition.transcriber",
    "fetch_model": "flows.models",
    "load_config": "tasks.config.pipeline",
    "parse_config": "tasks.config.pipeline",
    "run_pipeline": "flows.plain",
}
"""Modules of the public names."""


def __getattr__(name: str) -> Any:
    """Import a public name.

    Raises:
        AttributeError: If there is no such name.
        ImportError: If it needs the pipeline, which is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from configurable.extras import install_remedy

        remedy = install_remedy("pipeline")
        raise ImportError(f"starling.{name} needs {error.name}, which is not installed: {remedy}") from error
