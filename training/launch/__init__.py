"""Launching a training: starts and supervises its processes on this machine."""
