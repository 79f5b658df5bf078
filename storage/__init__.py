"""Storage: object stores through fsspec, shards, indexes, corpora on disk, atomic publication."""
