"""The decisions of a step, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..execution.batch_layout import NO_RESULTS, Results
from ..execution.decode_batch import NO_DRAFTS, Drafts
from ..request import PrefillJob, Request, Row
from ..scheduling.plan import Chunk, StepPlan


@dataclass(frozen=True)
class StepRecord:
    """One step. It is complete before any pass of the step runs, and does not change afterwards."""

    now: float
    """When the step began, in monotonic seconds."""
    plan: StepPlan
    ended: tuple[Request, ...] = ()
    """Requests that have ended since the last step."""
    cut: tuple[Row, ...] = ()
    """Rows that ended because memory was full."""
    preempted: tuple[Row, ...] = ()
    """Rows that freed their memory and wait."""
    admitted: PrefillJob | None = None
    reclaimed: int = 0
    """Bytes of all rows for which memory was reclaimed. 0: none."""
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    """Tokens that may follow the next token of a row."""
    unread: Results = field(default_factory=lambda: NO_RESULTS)
    """Results of the last pass that the rows with drafts follow before they are read."""
    caught_up: bool = False
    """Tokens of the last pass were read before this step was decided, because drafts need them."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        plan = self.plan
        return bool(plan.rows) or any((plan.chunk, plan.scored, plan.embedded))

    @property
    def mixed(self) -> Chunk | None:
        """The chunk in the pass of the rows."""
        return self.plan.chunk if self.plan.mixed else None

    @property
    def own_pass(self) -> Chunk | None:
        """The chunk with its own pass, behind that of the rows."""
        return None if self.plan.mixed else self.plan.chunk

    def summary(self) -> dict[str, Any]:
        """JSON-able, without prompt text: for logs, traces and comparisons."""
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
            "embedded": None if plan.embedded is None else plan.embedded.request.id,
            "drafts": {_name(row): list(tokens) for row, tokens in self.drafts.items()},
            "reclaimed": self.reclaimed,
        }


def _name(row: Row) -> str:
    return f"{row.request.id}.{row.index}"
