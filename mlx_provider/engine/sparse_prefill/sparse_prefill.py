"""Who has a prompt thinned out, and what becomes of it. Belongs to the engine thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...isolation import Isolation
from ...records import ScoresPrompts, Scoring
from ...upstream.sparse_cache import sparse
from ..execution.circuit_breaker import CircuitBreaker
from ..request import PrefillJob
from .selection import Nonsense, kept_places

log = logging.getLogger(__name__)

CACHED = 0.1
"""Share of a prompt that may be in the prefix cache, and is then not used: with more there, the
rest is prefilled whole, so that the conversation's next turn finds all of it."""
LEAST_PIECE = 16
"""Tokens that a scorer reads at once, at the least,"""
OTHERS = 64
"""and pieces that are none of the prompt's: one that takes more comes to no end."""


class SparsePrefill:
    """Of one engine."""

    def __init__(
        self,
        scorer: ScoresPrompts,
        *,
        share: float,
        least: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`share` of the tokens that are kept, of prompts with at least `least`."""
        self._scorer = scorer
        self._share = share
        self._least = least
        self._clock = clock
        self._breaker = CircuitBreaker()
        """Of the scorer."""

    @property
    def told(self) -> str:
        """For people."""
        return f"{self._share:g} of prompts from {self._least} tokens on"

    def begin(self, job: PrefillJob) -> None:
        """Have a prompt scored whose prefill begins, where that may pay. Never raises."""
        if not job.request.may_skip or len(job.tokens) < self._least:
            return
        if any(row.tokens for row in job.rows):
            return  # it was prefilled whole before, and is to say the same
        if not self._breaker.closed:
            self._breaker.passed(used=False)
            self._told(job, "the scorer keeps failing")
            return
        with Isolation() as tried:
            self._begin_scoring(job)
        if tried.fault is not None:
            self._failed(job, tried.fault.summary)

    def _begin_scoring(self, job: PrefillJob) -> None:
        if why := self._whole(job, len(job.tokens)):
            self._told(job, why)
        else:
            job.scoring = self._scorer.scoring(list(job.tokens))

    def advance(self, job: PrefillJob, seconds: float) -> None:
        """Score a piece, and more while they fit; with the last one the job knows its tokens.

        `seconds`: of all of them, and of what is on the device before. Never raises.
        """
        end = self._clock() + seconds
        with Isolation() as tried:
            while job.scoring is not None:
                self._advance(job, job.scoring)
                if self._clock() + job.piece_seconds > end:
                    break
        if tried.fault is not None:
            self._failed(job, tried.fault.summary)

    def _advance(self, job: PrefillJob, scoring: Scoring) -> None:
        """A piece, and its time: the first in a step waits for the rows' pass, too."""
        began = self._clock()
        scores = scoring.advance()
        job.piece_seconds = self._clock() - began
        job.pieces += 1
        if scores is None and job.pieces > OTHERS + len(job.tokens) // LEAST_PIECE:
            raise Nonsense(f"no scores after {job.pieces} pieces")
        if scores is not None:
            self._thin_out(job, scores)

    def _whole(self, job: PrefillJob, tokens: int) -> str:
        """Why all of a long prompt is to be computed; empty: it need not be."""
        prompt = job.request.prompt
        if prompt.spans or prompt.positions is not None or prompt.rope_delta:
            return "it has media"
        if job.done > CACHED * tokens:
            return f"{job.done} of its {tokens} tokens were cached"
        if tokens > self._scorer.longest_scored:
            return f"of {tokens} tokens, {self._scorer.longest_scored} at most can be scored"
        return ""

    def _thin_out(self, job: PrefillJob, scores: object) -> None:
        tokens = len(job.tokens)
        kept = kept_places(scores, tokens, self._share)
        self._breaker.passed(used=True)
        job.scoring = None
        if len(kept) == tokens:
            self._told(job, "all of it is kept")
            return
        cache = sparse(job.held())
        job.request.kept, job.cache = kept, cache
        job.request.prefilling = f"sparse: {len(kept)} of {tokens} prompt tokens were kept"
        job.thin_out(kept)

    def _failed(self, job: PrefillJob, told: str) -> None:
        log.warning("request %s: its prompt is not scored (%s)", job.request.id, told)
        job.scoring = None
        self._breaker.failed()
        self._told(job, "the scorer failed")

    def _told(self, job: PrefillJob, why: str) -> None:
        job.request.prefilling = f"prefilled whole: {why}"
