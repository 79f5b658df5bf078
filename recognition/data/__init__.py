"""Training data: batches of utterances or segments from shards, their targets and their augmentation."""
