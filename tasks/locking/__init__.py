"""Locks between processes and machines, and who owns them."""
