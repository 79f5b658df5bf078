"""From corpora to sets of utterances: manifest, sources, splits, duplicates, tables."""
