"""Starting a training: its processes on this machine, and their supervision."""
