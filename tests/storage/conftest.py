"""Makes the helpers of these tests importable."""

from support import load_beside

load_beside(__file__, "cached_shards.py")
