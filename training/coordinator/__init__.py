"""The coordinator: a separate process that keeps membership, leases and the training's progress."""
