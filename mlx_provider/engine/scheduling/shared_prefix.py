"""Finds a prompt in prefill that will soon provide most of another prompt. Imports no mlx."""

from __future__ import annotations

from collections.abc import Iterable

from ..prefix_cache.tree import common
from ..request import PrefillJob

WORTH_WAITING = 256
"""Least tokens that the other prompt must be about to provide."""


def awaits(job: PrefillJob, others: Iterable[PrefillJob]) -> bool:
    """Whether `job` should wait, because a started prompt will store its prefix soon."""
    return any(provides(leader, job) for leader in others if leader.admitted)


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    if leader is job or not leader.uses_prefix_cache or leader.request.salt != job.request.salt:
        return False
    if leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING
