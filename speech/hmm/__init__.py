"""Hidden Markov models with Gaussian mixtures: training, alignment, and decoding with a graph."""
