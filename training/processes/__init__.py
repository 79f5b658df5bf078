"""What all processes of a training share: child processes, exit reasons, addresses, keys, logs."""
