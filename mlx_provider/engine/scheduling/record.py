"""What a step does, as a value. Imports no mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..request import PrefillJob, Request, Row
from .chunking import StepPlan

Trims = Mapping[Row, int]
"""Rows that give back capacity, and the tokens that they keep room for."""


@dataclass(frozen=True)
class Start:
    """Where the prefill of a prompt will begin."""

    done: int = 0
    cuts: Sequence[int] = ()
    scored: bool = False
    """Its tokens are scored first."""


@dataclass(frozen=True)
class StepRecord:
    """One step. The fields before `plan` are what the engine does first, in their order."""

    now: float
    """When the step began, in monotonic seconds."""
    expired: Sequence[Request] = ()
    """Requests that end because their time limit has passed."""
    trims: Trims = field(default_factory=dict)
    cut: Sequence[Row] = ()
    """Rows that end because memory is full."""
    preempted: Sequence[Row] = ()
    """Rows that free their memory and wait."""
    reclaim: int = 0
    """Bytes of all rows, for which the caches of prefixes and other models make room. 0: nothing
    has changed."""
    admitted: PrefillJob | None = None
    claims: bool = False
    """What the admitted prompt will use of the prefix cache stays while memory is reclaimed."""
    begins: Sequence[PrefillJob] = ()
    """Prompts that get a cache, or start a restore from disk."""
    plan: StepPlan = field(default_factory=StepPlan)
    need: int | None = None
    """Bytes of all rows. `None`: not counted, because no row has outgrown its reservation."""
    limit: int = 0
    """Bytes that were available for them."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        plan = self.plan
        return bool(plan.rows) or any((plan.chunk, plan.scored, plan.embedded))

    def summary(self) -> dict[str, Any]:
        """JSON-able, without prompt text: for logs, traces and comparisons."""
        plan, chunk = self.plan, self.plan.chunk
        return {
            "expired": [request.id for request in self.expired],
            "trims": {_name(row): tokens for row, tokens in self.trims.items()},
            "cut": [_name(row) for row in self.cut],
            "preempted": [_name(row) for row in self.preempted],
            "reclaim": self.reclaim,
            "admitted": None if self.admitted is None else self.admitted.request.id,
            "begins": [job.request.id for job in self.begins],
            "rows": [_name(row) for row in plan.rows],
            "chunk": chunk and [chunk.job.request.id, chunk.start, chunk.stop],
            "mixed": plan.mixed,
            "scored": plan.scored and plan.scored.request.id,
            "embedded": plan.embedded and plan.embedded.request.id,
        }


def _name(row: Row) -> str:
    return f"{row.request.id}.{row.index}"
