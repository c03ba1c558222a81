"""What a simulated run came to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from mlx_provider_bench.report import Result

from .engines import Engines, Served
from .router_state import Memory

SHARES = (50, 95, 99)


@dataclass
class Account:
    prompt: int = 0
    memory: int = 0
    disk: int = 0
    refused: int = 0
    """Requests that a full engine refused."""
    lost: int = 0
    """Requests that an engine took with it, and that were sent again."""
    moved: int = 0
    """Requests on another engine than the one before of their session."""
    waits: array[float] = field(default_factory=lambda: array("f"))
    """Seconds to the first token, of each request."""
    span: float = 0.0
    """Seconds until the last request ended."""

    def add(self, prompt: int, now: float, served: Served, *, moved: bool) -> None:
        self.prompt += prompt
        self.memory += served.memory
        self.disk += served.disk
        self.moved += moved
        self.waits.append(served.begun - now)

    @property
    def requests(self) -> int:
        return len(self.waits)

    @property
    def hit_rate(self) -> float:
        return (self.memory + self.disk) / max(1, self.prompt)

    def row(self, name: str, engines: Engines, memory: Memory | None) -> Result:
        waits = np.percentile(np.frombuffer(self.waits, np.float32), SHARES)
        computed = engines.computed
        return {
            "policy": name,
            "engines": engines.count,
            "requests": self.requests,
            "hit_rate": round(self.hit_rate, 4),
            "disk_hit_rate": round(self.disk / max(1, self.prompt), 4),
            **{f"ttft_p{n}": round(float(w), 3) for n, w in zip(SHARES, waits, strict=True)},
            "imbalance": round(max(computed) * len(computed) / max(1, sum(computed)), 3),
            "moved": self.moved,
            "moved_share": round(self.moved / max(1, self.requests), 4),
            "refused": self.refused,
            "lost": self.lost,
            "hours": round(self.span / 3600, 2),
            "router_items": None if memory is None else memory.peak,
            "evicted": None if memory is None else memory.evicted,
        }
