"""Common parts of a training's processes: child processes, exit reasons, addresses, keys, logs."""
