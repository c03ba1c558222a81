"""Examples are the same in each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


def for_examples(
    strategy: st.SearchStrategy[Any], count: int, run: Callable[[Any], None], *, shrinks: bool
) -> None:
    """`shrinks`: shrink a value that fails."""
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)

    chosen = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )

    def each(value: Any) -> None:
        run(value)

    chosen(given(value=strategy)(each))()


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks, at = [], 0
    for size in [*sizes, len(text)]:
        chunks.append(text[at : at + size])
        at += size
    return chunks
