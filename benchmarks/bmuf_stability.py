"""Stability limits of block momentum combined with an optimizer's momentum: `python -m benchmarks.bmuf_stability`.

On a quadratic loss of curvature h, all learners do the same, so a block is a linear map of the model W, the block
momentum Δ and the optimizer's velocity v; training is stable while its spectral radius is below 1. Prints the largest
stable lr · h, for momentum kept across blocks and for momentum reset at every block. For SGD with momentum m alone, the
limit is 2 (1 + m).
"""

import argparse
import json

import numpy as np
from numpy.typing import NDArray

MOMENTUM = 0.9
ETAS, TAUS = (0.0, 0.5, 0.75, 0.875, 0.9375), (4, 16, 64)


def block(rate: float, eta: float, tau: int, *, resets: bool, nesterov: bool) -> NDArray[np.float64]:
    """The matrix [3, 3] of a block on (W, Δ, v); BMUF of arXiv:1703.05880 with ζ = 1, h = 1.

    Args:
        rate: lr · h.
        eta: Block momentum.
        tau: Steps per block.
        resets: Whether v is zero at the start of a block.
        nesterov: Whether the block starts at the look-ahead point.
    """
    columns = []
    for model, delta, velocity in np.eye(3):
        start = model + (eta * delta if nesterov else 0.0)
        weights, speed = start, 0.0 if resets else velocity
        for _ in range(tau):
            speed = MOMENTUM * speed + weights
            weights = weights - rate * speed
        moved = eta * delta + weights - start
        columns.append((model + moved, moved, speed))
    return np.array(columns).T


def largest(eta: float, tau: int, *, resets: bool, nesterov: bool) -> float:
    """The lr · h up to which all rates are stable, within 2 %."""
    rate = 1e-5
    while rate < 2 * (1 + MOMENTUM):
        radius = np.abs(np.linalg.eigvals(block(rate, eta, tau, resets=resets, nesterov=nesterov))).max()
        if radius >= 1:
            break
        rate *= 1.02
    return rate / 1.02


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for eta in ETAS:
        for tau in TAUS:
            row: dict[str, float] = {"eta": eta, "tau": tau}
            for name, resets in (("kept", False), ("reset", True)):
                for kind in ("nesterov", "classical"):
                    row[f"{kind}_{name}"] = largest(eta, tau, resets=resets, nesterov=kind == "nesterov")
            rows.append(row)
    if args.json:
        print(json.dumps({"benchmark": "bmuf_stability", "momentum": MOMENTUM, "rows": rows}))
        return
    print(f"{'eta':>7} {'tau':>4} {'nesterov, kept':>15} {'reset':>8} {'classical, kept':>16} {'reset':>8}")
    for row in rows:
        values = [row[f"{kind}_{name}"] for kind in ("nesterov", "classical") for name in ("kept", "reset")]
        print("{:7.4f} {:4.0f} {:15.4f} {:8.4f} {:16.4f} {:8.4f}".format(row["eta"], row["tau"], *values))


if __name__ == "__main__":
    main()
