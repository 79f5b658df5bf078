"""Starling: speech recognition, from a corpus to a champion in the model registry.

The command is `starling` or `python -m starling`. The code is in the packages flows, tasks, training, speech and
storage; this one holds the version and the example configurations, and importing it imports none of the others.
"""

__version__ = "0.1.0"
