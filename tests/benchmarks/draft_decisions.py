"""Time of the host to decide the drafts of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from mlx_provider.engine.scheduling.costs import Curve
from mlx_provider.engine.speculation.policy import Policy, RowAcceptance
from speculation_curves import DEVICES

DEVICE = "M3 Max, dense 8B"
SHARES = (0.8, 0.7, 0.6)
"""Of drafts that hold, by drafter: each is trusted for each row."""
STEPS = 200


def decisions(rows: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a decision, by rows and drafters."""
    curve = DEVICES[DEVICE].measured()
    return {
        f"{count} rows, {drafters} drafters": round(1000 * decided(curve, count, drafters), 3)
        for count in rows
        for drafters in range(1, 1 + len(SHARES))
    }


def decided(curve: Curve, rows: int, drafters: int) -> float:
    policy, spent = Policy(), list[float]()
    trusted = [[_trusted(policy, at, row) for at in range(drafters)] for row in range(rows)]
    for _ in range(STEPS):
        began = time.thread_time()
        policy.wanted(trusted, 0, lambda drafts: curve.seconds(rows + drafts))
        policy.rested()
        spent.append(time.thread_time() - began)
    return median(spent)


def _trusted(policy: Policy, drafter: int, row: int) -> RowAcceptance:
    odds = RowAcceptance()
    odds.learn(round(20 * SHARES[(drafter + row) % len(SHARES)]), 20)
    policy.sources[drafter].everyone.learn(14, 20)
    return odds
