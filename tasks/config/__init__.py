"""The configuration of a pipeline, and the checks before a run."""
