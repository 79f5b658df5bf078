"""Fixtures of the tests of recognition: a corpus of tones, and a model that knows its six words."""

from support import load_beside

tones = load_beside(__file__, "../training/tones.py")
corpus, trained = tones.corpus, tones.trained
