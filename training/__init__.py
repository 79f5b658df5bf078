"""Learners: the training loop, its data, optimization, checkpoints and journal, and its launch."""
