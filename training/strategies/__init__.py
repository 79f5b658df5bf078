"""Methods of distributed training as programs of a single learner, which the training engine and the simulator run."""
