"""Hyperparameter search: the space, the methods that propose trials of it, and the study that keeps their results."""
