"""Fixtures of the tests of tasks."""

from support import load_beside

api = load_beside(__file__, "registered.py").api
