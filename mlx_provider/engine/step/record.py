"""What a step decides, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..execution.decode_batch import NO_DRAFTS, Drafts
from ..request import PrefillJob, Request, Row
from ..scheduling.plan import Chunk, StepPlan


@dataclass(frozen=True)
class StepRecord:
    """One step. It is complete before any pass of the step runs, and nothing changes it then."""

    now: float
    """When the step began, in monotonic seconds."""
    plan: StepPlan
    ended: tuple[Request, ...] = ()
    """Requests that have ended since the last step."""
    cut: tuple[Row, ...] = ()
    """Rows that ended for want of memory."""
    preempted: tuple[Row, ...] = ()
    """Rows that gave up their place in memory, and wait."""
    admitted: PrefillJob | None = None
    reclaimed: int = 0
    """Bytes for all rows for which others were asked to make room; 0: none were asked."""
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    """Tokens that may follow the next one of a row."""
    caught_up: bool = False
    """Tokens of the last pass were read before this one was decided, as drafts need them."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        plan = self.plan
        return bool(plan.rows) or plan.chunk is not None or plan.scored is not None

    @property
    def mixed(self) -> Chunk | None:
        """The chunk that is in the pass of the rows."""
        return self.plan.chunk if self.plan.mixed else None

    @property
    def own_pass(self) -> Chunk | None:
        """The chunk that has a pass of its own, behind that of the rows."""
        return None if self.plan.mixed else self.plan.chunk

    def summary(self) -> dict[str, Any]:
        """JSON-able, without the text of any prompt: for logs, traces and comparisons."""
        plan, chunk = self.plan, self.plan.chunk
        of_chunk = None if chunk is None else [chunk.job.request.id, chunk.start, chunk.stop]
        return {
            "ended": [request.id for request in self.ended],
            "cut": [_name(row) for row in self.cut],
            "preempted": [_name(row) for row in self.preempted],
            "admitted": None if self.admitted is None else self.admitted.request.id,
            "rows": [_name(row) for row in plan.rows],
            "chunk": of_chunk,
            "mixed": plan.mixed,
            "scored": None if plan.scored is None else plan.scored.request.id,
            "drafts": {_name(row): list(tokens) for row, tokens in self.drafts.items()},
            "reclaimed": self.reclaimed,
        }


def _name(row: Row) -> str:
    return f"{row.request.id}.{row.index}"
