"""What an engine of the simulation takes for a prompt and for a token, by a device's curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_provider.errors import BadRequest

ROWS = 16
"""Rows beside which a prompt's pace is known; with more it is that of so many."""
DEPTH = 50_000
CHUNK = 2048


@dataclass(frozen=True)
class Speed:
    """Seconds."""

    token: float
    """For a token of a prompt that is not cached, at the front."""
    pair: float = 0.0
    """For such a token and a token before it."""
    launch: float = 0.0
    """Of every request."""
    slower: Sequence[float] = (1.0,)
    """How many times longer a prompt takes beside 0, 1, 2... rows that decode."""
    step: Sequence[float] = (0.0,)
    """For a step of 1, 2... rows, each of which gains a token."""
    key: float = 0.0
    """Added to a step for each cached token of its rows."""
    token_bytes: int = 100_000
    """Of a cached token."""

    def prefill(self, tokens: int, depth: int, rows: int) -> float:
        """Of `tokens` behind `depth` cached ones, beside `rows`."""
        pairs = tokens * (depth + tokens / 2)
        slower = self.slower[min(rows, len(self.slower) - 1)]
        return self.launch + (tokens * self.token + pairs * self.pair) * slower

    def pace(self, rows: int, keys: int) -> float:
        """Of a token of an answer, among `rows` that hold `keys` tokens."""
        steps = self.step
        wide = steps[rows - 1] if rows <= len(steps) else steps[-1] * rows / len(steps)
        return wide + keys * self.key


def speed_of(chip: str, model: str) -> Speed:
    """By `device_curves.py`, whose scheduler is ours. Raises `BadRequest` for a name."""
    from device_curves import CHIPS, MODELS, Estimate, simulate

    for name, known in ((chip, CHIPS), (model, MODELS)):
        if name not in known:
            raise BadRequest(f"{name!r} is none of {', '.join(known)}", param="chip")
    device = Estimate(CHIPS[chip], MODELS[model])
    flat = device.seconds(0, 0, CHUNK, 0)
    idle = simulate(device, 0).rate
    return Speed(
        token=flat / CHUNK,
        pair=(device.seconds(0, 0, CHUNK, DEPTH) - flat) / CHUNK / DEPTH,
        launch=device.seconds(1, 0),
        slower=[max(1.0, idle / simulate(device, rows).rate) for rows in range(ROWS + 1)],
        step=[device.seconds(rows, 0) for rows in range(1, 65)],
        key=(device.seconds(1, DEPTH) - device.seconds(1, 0)) / DEPTH,
        token_bytes=int(MODELS[model].key),
    )
