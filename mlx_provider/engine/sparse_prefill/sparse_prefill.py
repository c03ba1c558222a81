"""Decides which prompts are prefilled sparsely, and scores them. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...isolation import Isolation
from ...records import ScoresPrompts, Scoring
from ...upstream.sparse_cache import sparse, widest_window
from ..execution.circuit_breaker import CircuitBreaker
from ..request import PrefillJob
from .selection import Nonsense, kept_places

log = logging.getLogger(__name__)

CACHED = 0.1
"""Above this cached share, the rest is prefilled completely, so that the next turn finds all of it.
Below, the cached prefix is not used."""
LEAST_PIECE_TOKENS = 16
OTHERS = 64
"""Allowed scoring pieces beyond those of the prompt. More mean that the scorer does not end."""


class SparsePrefill:
    def __init__(
        self,
        scorer: ScoresPrompts,
        *,
        share: float,
        least: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`share`: of the tokens to keep, of prompts with at least `least` tokens."""
        self._scorer = scorer
        self._share = share
        self._least = least
        self._clock = clock
        self._breaker = CircuitBreaker()

    @property
    def summary(self) -> str:
        return f"{self._share:g} of prompts from {self._least} tokens on"

    def begin(self, job: PrefillJob) -> None:
        """Never raises."""
        if not job.request.may_skip or len(job.tokens) < self._least:
            return
        if any(row.tokens for row in job.rows):
            return  # a prompt that was prefilled completely before must give the same result
        if not self._breaker.closed:
            self._breaker.passed(used=False)
            self._prefill_whole(job, "the scorer keeps failing")
            return
        with Isolation() as tried:
            self._begin_scoring(job)
        if tried.fault is not None:
            self._failed(job, tried.fault.summary)

    def _begin_scoring(self, job: PrefillJob) -> None:
        if why := self._whole(job, len(job.tokens)):
            self._prefill_whole(job, why)
        else:
            job.scoring = self._scorer.scoring(list(job.tokens))

    def advance(self, job: PrefillJob, seconds: float) -> None:
        """Score pieces while they fit, at least one. After the last, the job has its tokens.
        `seconds`: limit for all pieces and for earlier work on the device. Never raises."""
        end = self._clock() + seconds
        with Isolation() as tried:
            while job.scoring is not None:
                self._advance(job, job.scoring)
                if self._clock() + job.piece_seconds > end:
                    break
        if tried.fault is not None:
            self._failed(job, tried.fault.summary)

    def _advance(self, job: PrefillJob, scoring: Scoring) -> None:
        """Score and time a piece. The first piece in a step also waits for the pass of the rows."""
        began = self._clock()
        scores = scoring.advance()
        job.piece_seconds = self._clock() - began
        job.pieces += 1
        if scores is None and job.pieces > OTHERS + len(job.tokens) // LEAST_PIECE_TOKENS:
            raise Nonsense(f"no scores after {job.pieces} pieces")
        if scores is not None:
            self._thin_out(job, scores)

    def _whole(self, job: PrefillJob, tokens: int) -> str:
        """Why all of a long prompt must be computed. Empty: it need not be."""
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
        cache = sparse(job.held())
        kept = kept_places(scores, tokens, self._share, widest_window(cache))
        self._breaker.passed(used=True)
        job.scoring = None
        if len(kept) == tokens:
            self._prefill_whole(job, "all of it is kept")
            return
        job.request.kept, job.cache = kept, cache
        job.request.prefilling = f"sparse: {len(kept)} of {tokens} prompt tokens were kept"
        job.thin_out(kept)

    def _failed(self, job: PrefillJob, told: str) -> None:
        log.warning("request %s: its prompt is not scored (%s)", job.request.id, told)
        job.scoring = None
        self._breaker.failed()
        self._prefill_whole(job, "the scorer failed")

    def _prefill_whole(self, job: PrefillJob, why: str) -> None:
        job.request.prefilling = f"prefilled whole: {why}"
