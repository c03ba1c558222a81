"""Short questions with long answers, and asking them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_provider_bench.model_speed import WORDS
from peers import Run
from servers import Client, Messages


def short_stories(count: int, turn: int) -> list[Messages]:
    """Questions that the demo models answer at length, no two alike."""
    words = [WORDS[(7 * turn + at) % len(WORDS)] for at in range(count)]
    return [[{"role": "user", "content": f"Tell me a story. {word}"}] for word in words]


def ask_all(client: Client, prompts: Sequence[Messages], max_tokens: int) -> Run:
    """All at once, and what it took."""
    began = time.perf_counter()
    answers = client.ask_together(prompts, max_tokens)
    return Run(answers, time.perf_counter() - began)
