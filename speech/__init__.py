"""The domain: audio, features, text and tokens, acoustic models, decoding, scoring."""
