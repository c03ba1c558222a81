"""The state of one engine, and the decisions of a step as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...records import LoadedModel
from ..execution.batching import Batching
from ..execution.decode_batch import NO_DRAFTS, DecodeBatch, Drafts
from ..feature_cache import FeatureCache
from ..fixed_shapes import FixedShapes
from ..prefix_cache.policy import PrefixCachePolicy
from ..request import PrefillJob, Request, Row
from ..scheduling.chunking import Chunk, StepPlan
from ..scheduling.costs import PassTimer
from ..scheduling.scheduler import Scheduler
from ..sparse_prefill import SparsePrefill
from ..speculation.step import DraftStep
from ..step_output import Recent, Recorder, StepOutput, TokenNames


@dataclass(eq=False)
class State:
    """Engine thread only."""

    model: LoadedModel
    scheduler: Scheduler
    make_cache: Callable[[], list[Any]]
    recorder: Recorder
    clock: Callable[[], float]
    output: StepOutput
    batching: Batching
    drafting: DraftStep
    timer: PassTimer
    recent: Recent
    token_names: TokenNames
    features: FeatureCache
    prefix_cache: PrefixCachePolicy | None
    sparse_prefill: SparsePrefill | None
    fixed: FixedShapes | None
    advanced: float = 0.0
    """When the decoding rows last got a token."""
    behind: list[float] = field(default_factory=list)
    """Expected seconds of the chunks that were launched after the last pass of the rows."""
    read_at: float = 0.0
    """When the device became idle, because drafts needed the last tokens."""
    ended: list[Request] = field(default_factory=list)
    """Requests that have ended since the last step was decided."""
    corrupted: set[Row] = field(default_factory=set)
    """Rows of this step whose caches are corrupted."""

    def settle(self) -> None:
        """Charge rows for the caches in which a step has left them."""
        if self.prefix_cache is not None:
            self.prefix_cache.settle(self.scheduler.running, self.batch.layout.cache_of)
        self.charge_merged()

    def charge_merged(self) -> None:
        """Charge rows in caches with others as much as the longest. Call it after rows have joined,
        left or decoded."""
        merged = self.batch.layout.merged()
        for row in self.scheduler.running:
            row.merged = merged.get(row, 0)

    @property
    def batch(self) -> DecodeBatch:
        """The rows that decode."""
        return self.batching.rows


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
