"""Short questions with long answers."""

from __future__ import annotations

from mlx_provider_bench.models.random_weights import WORDS
from mlx_provider_bench.servers.client import Messages


def short_stories(count: int, turn: int) -> list[Messages]:
    """Questions that the demo models answer at length, no two alike."""
    words = [WORDS[(7 * turn + at) % len(WORDS)] for at in range(count)]
    return [[{"role": "user", "content": f"Tell me a story. {word}"}] for word in words]
