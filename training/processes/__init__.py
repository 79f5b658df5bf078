"""Child processes: starting, supervising and ending them, their addresses, logs and exit reasons."""
