"""One learner: its data, the arithmetic of a step, optimizer, checkpoints and validation."""
