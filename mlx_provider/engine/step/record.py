"""What a step decides, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..execution.decode_batch import NO_DRAFTS, Drafts
from ..scheduling.plan import StepPlan


@dataclass(frozen=True)
class StepRecord:
    """One step: made before anything of it runs."""

    plan: StepPlan
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    """Tokens that may follow the next one of a row."""
    caught_up: bool = False
    """Tokens of the last pass were read before this step's pass, as drafts need them."""
