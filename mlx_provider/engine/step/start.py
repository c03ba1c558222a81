"""Starts a prompt: looks it up in the prefix cache and gives it a row cache."""

from __future__ import annotations

import logging
from functools import partial

from ...isolation import Fault, Isolation
from ...upstream.cache_classes import sparse
from ..prefix_cache.cache import Match
from ..recent import LookedUp
from ..request import PrefillJob, Request
from ..row_cache import grow_by
from .state import State

log = logging.getLogger(__name__)


class Start:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State) -> None:
        self._state = state

    def look_up(self, job: PrefillJob) -> None:
        """Find the longest stored prefix of a queued prompt."""
        if self._state.prefix_cache is not None and job.uses_prefix_cache:
            with Isolation(partial(_not_cached, job.request)):
                self._state.prefix_cache.look_up(job)

    def begin(self, job: PrefillJob) -> None:
        """Give an admitted prompt its row cache, or start a restore from disk."""
        state = self._state
        inputs = job.request.inputs
        capacity = len(job.tokens) if inputs else state.scheduler.admission.kv_capacity(job)
        if state.prefix_cache is not None and job.uses_prefix_cache:
            with Isolation(partial(_not_cached, job.request)):
                self._looked_up(job.request, state.prefix_cache.begin(job, capacity))
        if job.restoring:
            return
        if state.sparse_prefill is not None and job.uses_prefix_cache:
            state.sparse_prefill.begin(job)
        if not job.uses_prefix_cache:
            job.leave_prefix()
        if job.cache is None:
            job.cache = state.make_cache()
            grow_by(job.cache, capacity)
        if job.places is not None:
            job.cache = sparse(job.cache)
        if not job.request.ahead:
            state.recorder.tokens(prefilled=0, cached=job.done, decoded=0)

    def _looked_up(self, request: Request, found: Match | None) -> None:
        if found is None or request.ahead:
            return
        diverged = found.diverged_at is not None
        seen = LookedUp(
            self._state.clock(), request.id, found.asked, found.shared, found.length, diverged
        )
        self._state.recent.lookups.add(seen)
        self._state.recorder.looked_up(seen.lost)


def _not_cached(request: Request, fault: Fault) -> None:
    log.error("request %s gets nothing from the prefix cache\n%s", request.id, fault.trace)
