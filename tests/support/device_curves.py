"""Curves of devices, estimated from published figures: what a chip reads and computes, and what a
model needs of it. They prove decisions, not speed: no device was measured. It imports no mlx.
"""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from mlx_provider.engine.scheduling.chunking import GRID, LONGEST_GAP
from mlx_provider.engine.scheduling.costs import Curve

PROMPT = 16_000
STREAM = 8_000
"""Tokens that each stream holds."""
HOST = 0.002
"""Seconds in which a step is launched."""
WIDTHS = (1, 4, 8, 16, 32, 64, 256)
DEEP_WIDTHS = (1, 8, 64, 256, 1024)
DEPTH = 8192
"""Of the deep cache over which a device is measured."""
WIDE = 2**50
"""Memory without end."""
SCATTERED = 0.15
"""Share of all experts whose reading takes as long as that of the few that one token takes."""
MAX_CHUNK = 2048


class Device(Protocol):
    """A model on a chip."""

    @property
    def mixes(self) -> bool:
        """Whether chunks may share the pass of rows that decode."""

    @property
    def grid(self) -> int:
        """Where passes of a prompt may end."""

    def seconds(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        """What a pass of `rows` that hold `keys` tokens, and of a chunk behind `depth`, takes."""

    def measured(self) -> Curve:
        """What the engine would find at load."""


@dataclass(frozen=True)
class Chip:
    """What a device reads and computes in a second."""

    bytes: float
    """Of weights and keys."""
    products: float
    """Floating-point operations of quantised matrix products, in full tiles."""
    attention: float
    """Those of attention over a long cache by many queries,"""
    vector: float
    """and by a few, which have a kernel of their own where queries times query heads for a KV head
    are at most 32."""
    plateau: int
    """More queries than those, up to so many, take as long as so many."""
    tile: int = 32
    """Rows of a tile of matrix products; a part of one takes as long as all of it."""
    few: int = 13
    """Fewer rows than this take no tile: five of them cost what one costs."""
    launches: float = 0.0
    """Seconds of a pass that are neither reading nor computing."""


@dataclass(frozen=True)
class Model:
    """What one pass needs."""

    weights: float
    """Bytes that every pass reads."""
    products: float
    """Floating-point operations of a token."""
    key: float
    """Bytes of a cached token."""
    heads: int
    """Query heads for a KV head."""
    bandwidth: float
    """Share of the bandwidth at which one query reads the cache: less with few KV heads."""
    pair: float
    """Floating-point operations of a new token and a cached one."""
    experts: float = 0.0
    """Bytes of all experts, of which a token takes 8 in 128."""
    scattered: float = 1.6
    """Times longer that products of few tokens for each of many experts take."""
    recurrent: float = 0.0
    """Share of the weights in recurrent layers, which rows and a chunk in one pass read each."""


CHIPS = {
    "M3 Max": Chip(390e9, products=11.5e12, attention=9e12, vector=2.1e12, plateau=78),
    "M5 Max": Chip(560e9, products=46e12, attention=36e12, vector=3.3e12, plateau=220),
    "H200": Chip(
        4.6e12, products=350e12, attention=400e12, vector=40e12, plateau=528, tile=64,
        launches=0.0015,
    ),
}  # fmt: skip
"""M3 Max: 40 cores; M5 Max: 1.4 times its bandwidth, 4 times its compute. Attention of a layer with
32 query heads of 128 over 32k keys takes 2.03 ms for 8 queries and 4.63 ms for 12 to 48 on an M3
Max, 1.32 and 3.63 ms on an M5 Max, and 2.99 ms for 64 (mlx issue 3826). H200: no such table is
known; one tile of 128 queries for each of 32 heads on 132 multiprocessors."""
MODELS = {
    "dense 8B": Model(4.7e9, 16.2e9, 147_456, heads=4, bandwidth=1.0, pair=0.59e6),
    "30B-A3B": Model(1.5e9, 6.4e9, 98_304, heads=8, bandwidth=0.7, pair=0.8e6, experts=15.6e9),
    "hybrid 9B": Model(
        5.0e9, 17.3e9, 32_768, heads=4, bandwidth=0.3, pair=0.15e6, recurrent=0.2
    ),
}  # fmt: skip
"""In 4 bit. One query reads the cache of 4 KV heads of 256 at 0.19 to 0.36 of the bandwidth (mlx
issue 3837)."""


@dataclass(frozen=True)
class Estimate:
    """A device that is known from its figures."""

    chip: Chip
    model: Model

    @property
    def grid(self) -> int:
        return GRID if self.model.recurrent else 1

    @property
    def mixes(self) -> bool:
        return True

    def seconds(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        again = self.model.recurrent * self.model.weights if rows and chunk else 0.0
        attended = keys * self.per_key(1) + (depth * self.per_key(chunk) if chunk else 0.0)
        read = again / self.chip.bytes
        return self.chip.launches + self._products(rows + chunk) + attended + read

    def per_key(self, queries: int) -> float:
        """Seconds of attention for each cached token of a row with so many queries."""
        chip, model = self.chip, self.model
        read = model.key / (chip.bytes * model.bandwidth)
        if queries <= 8 and queries * model.heads <= 32:
            return max(read, queries * model.pair / chip.vector)
        return max(read, max(queries, chip.plateau) * model.pair / chip.attention)

    def measured(self) -> Curve:
        deep: list[tuple[int, float]] = []
        for width in DEEP_WIDTHS:
            if width <= 64 or deep[-1][1] * width / deep[-1][0] <= LONGEST_GAP:
                deep.append((width, self.seconds(0, 0, width, DEPTH)))
        widths = sorted({*WIDTHS, *(n for n, _ in deep)})
        return Curve.through([(n, self.seconds(0, 0, n)) for n in widths], deep, DEPTH)

    def _products(self, width: int) -> float:
        chip, model = self.chip, self.model
        once = model.weights / chip.bytes
        if model.experts:
            taken = max(SCATTERED, 1 - (1 - 8 / 128) ** width) * model.experts / chip.bytes
            return once + taken + model.scattered * width * model.products / chip.products
        if width < chip.few:
            return once * max(1, 0.85 * ceil(width / 5))
        tile = chip.tile * model.products / chip.products
        return max(once, tile * ceil(width / chip.tile))
