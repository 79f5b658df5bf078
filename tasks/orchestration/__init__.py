"""Prefect: stages as tasks, nodes as runs, logs, events and artifacts."""
