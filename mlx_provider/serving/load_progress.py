"""What is loaded or measured now, for those who wait for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..protocol.health import LoadingFigures


@dataclass(frozen=True, eq=False)
class _Stage:
    model: str
    what: str
    done: Callable[[], int]
    total: int
    unit: str


class LoadProgress:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._stages: dict[_Stage, None] = {}

    @contextmanager
    def stage(
        self, model: str, what: str, done: Callable[[], int] = int, total: int = 0, unit: str = ""
    ) -> Iterator[None]:
        """Report a stage during the block. `done` is called by other threads."""
        stage = _Stage(model, what, done, total, unit)
        self._stages[stage] = None
        try:
            yield
        finally:
            del self._stages[stage]

    def figures(self) -> list[LoadingFigures]:
        return [
            LoadingFigures(
                model=stage.model,
                what=stage.what,
                done=min(max(0, stage.done()), stage.total),
                total=stage.total,
                unit=stage.unit,
            )
            for stage in list(self._stages)
        ]
