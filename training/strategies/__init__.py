"""Methods of distributed training as programs: what one learner does. Engine and simulator run them."""
