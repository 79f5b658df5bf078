"""Makes the small problem of these tests importable."""

from support import load_beside

load_beside(__file__, "../ranks.py")
