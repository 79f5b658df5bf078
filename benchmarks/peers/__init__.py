"""Comparison of Starling with other systems on the same emulated work: see `python -m benchmarks.peers --help`."""
