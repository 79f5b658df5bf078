"""Figures about Starling's speed, each from one command: `python -m benchmarks.NAME`."""
