"""The state of one engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...records import LoadedModel
from ..execution.batching import Batching
from ..execution.decode_batch import DecodeBatch
from ..feature_cache import FeatureCache
from ..fixed_shapes import FixedShapes
from ..prefix_cache.policy import PrefixCachePolicy
from ..request import Row
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
