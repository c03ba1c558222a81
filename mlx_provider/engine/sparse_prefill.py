"""Sparse prefill: computes only the important tokens of a long prompt, each at its own position.

After SpecPrefill (arXiv 2502.02789): a small model, the scorer, estimates the attention that tokens
get from later ones. Chunks of 32 tokens with little attention are left out. The model does not see
them, so only the operator can enable this. In a pass, each token is a row at its own position.
Attention and recurrent layers treat them as one row. A trial shows if a model supports that."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..isolation import CircuitBreaker, attempt
from ..records import LoadedModel, ScoresPrompts
from ..upstream.cache_classes import sparse
from .execution.grouped_kv import MixedChunk, with_wide_rows
from .request import PrefillJob

CHUNK = 32  # tokens kept or left out together: a single token means little without its neighbours
SMOOTHING = 13  # width of the moving average over the scores, in tokens
FIRST = 32  # first tokens that are always kept, because they get much of the attention
LAST = 128  # last tokens that are always kept: the question, and the start of the reply
CACHED = 0.1
"""If a larger share of a prompt is cached, the rest is prefilled completely, so that the next turn
finds all of it. Else the cached prefix is not used."""
LEAST_PIECE_TOKENS, OTHERS = 16, 64
"""A scorer may take one piece per so many tokens, and so many others. With more, it has failed."""
log = logging.getLogger(__name__)


class Nonsense(ValueError):
    """Unusable scores."""


def kept_places(scores: Any, tokens: int, share: float) -> list[int]:
    """Ascending indices of the tokens to keep, about `share` of all, including both ends. `scores`:
    (tokens,). Raises `Nonsense`."""
    means = chunk_scores(scores, tokens)
    starts = np.arange(0, tokens, CHUNK)
    always = (starts < FIRST) | (starts + CHUNK > tokens - LAST)
    order = np.lexsort((starts, -means, ~always))
    wanted = max(int(always.sum()), round(share * len(starts)))
    keep = np.zeros(len(starts), bool)
    keep[order[:wanted]] = True
    places: list[int] = np.flatnonzero(np.repeat(keep, CHUNK)[:tokens]).tolist()
    return places


def chunk_scores(scores: Any, tokens: int) -> NDArray[np.float64]:
    """Mean of the smoothed scores (tokens,) of each chunk, (chunks,). Raises `Nonsense`."""
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (tokens,):
        raise Nonsense(f"scores of shape {found.shape} for {tokens} tokens")
    if not np.isfinite(found).all():
        raise Nonsense("scores that are not finite numbers")
    padded = np.pad(found, SMOOTHING // 2, mode="edge")
    smooth = np.convolve(padded, np.full(SMOOTHING, 1 / SMOOTHING), "valid")
    starts = np.arange(0, tokens, CHUNK)
    means: NDArray[np.float64] = np.add.reduceat(smooth, starts)
    return means / (np.minimum(starts + CHUNK, tokens) - starts)


def run_alone(model: LoadedModel, chunk: MixedChunk) -> mx.array:
    """Append a chunk to its row's cache in its own pass. Returns logits (vocab,) after it."""
    tokens, places = (mx.array(list(ids), mx.int32) for ids in (chunk.tokens, chunk.positions))
    last = mx.array([len(chunk.tokens) - 1])
    return model.decode(tokens, with_wide_rows(None, [], [], [chunk.wide]), places, last)[0]


@dataclass(eq=False)
class SparsePrefill:
    """Decides which tokens of each prompt are prefilled."""

    scorer: ScoresPrompts
    share: float  # share of the tokens to keep
    least: int  # tokens of the shortest prompt that is scored
    clock: Callable[[], float] = time.perf_counter
    _breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    def begin(self, job: PrefillJob, cached: int) -> None:
        """Begin to score a prompt if it is long enough. `cached`: its tokens in the prefix cache.
        If the prompt must be computed whole, its request says why. Never raises."""
        # after a preemption, a prompt that was prefilled whole is prefilled whole again
        again = any(row.tokens for row in job.rows)
        if again or not job.request.may_skip or len(job.tokens) < self.least:
            return
        if not self._breaker.closed:
            self._breaker.record_success(used=False)  # one step nearer to the next attempt
            self._prefill_whole(job, "the scorer keeps failing")
            return
        self._try(job, partial(self._start, job, cached))

    def _start(self, job: PrefillJob, cached: int) -> None:
        if why := self._why_whole(job, cached):
            self._prefill_whole(job, why)
        else:
            job.scoring = self.scorer.scoring(list(job.tokens))

    def advance(self, job: PrefillJob, seconds: float) -> None:
        """Score at least one piece, and more within the time. After the last one, the job has only
        the tokens to keep. `seconds`: for these pieces and earlier device work. Never raises."""
        self._try(job, partial(self._score, job, seconds))

    def _score(self, job: PrefillJob, seconds: float) -> None:
        now = self.clock()
        end, most = now + seconds, OTHERS + len(job.tokens) // LEAST_PIECE_TOKENS
        while job.scoring is not None:
            scores = job.scoring.advance()
            began, now = now, self.clock()
            job.pieces += 1
            if scores is not None:
                self._thin_out(job, scores)
            elif job.pieces > most:
                raise Nonsense(f"no scores after {job.pieces} pieces")
            elif now + (now - began) > end:  # a further piece takes as long as this one
                break

    def _why_whole(self, job: PrefillJob, cached: int) -> str:
        """Why all of a long prompt must be computed. Empty: the scorer may leave tokens out."""
        prompt, tokens = job.request.prompt, len(job.tokens)
        if prompt.spans or prompt.positions is not None or prompt.rope_delta:
            return "it has media"
        if cached > CACHED * tokens:
            return f"{cached} of its {tokens} tokens were cached"
        if tokens > self.scorer.longest_scored:
            return f"of {tokens} tokens, {self.scorer.longest_scored} at most can be scored"
        return ""

    def _thin_out(self, job: PrefillJob, scores: object) -> None:
        tokens = len(job.tokens)
        selected = kept_places(scores, tokens, self.share)
        self._breaker.record_success(used=True)
        job.scoring = None
        if len(selected) == tokens:
            self._prefill_whole(job, "all of it is kept")
            return
        job.request.selected, job.cache = selected, sparse(job.row_cache())
        job.request.prefilling = f"sparse: {len(selected)} of {tokens} prompt tokens were kept"
        job.thin_out(selected)

    def _try(self, job: PrefillJob, work: Callable[[], None]) -> None:
        """Do `work`. After a fault, all of the prompt is prefilled."""
        if (fault := attempt(work)) is not None:
            log.warning("request %s: its prompt is not scored (%s)", job.request.id, fault.summary)
            job.scoring = None
            self._breaker.record_failure()
            self._prefill_whole(job, "the scorer failed")

    def _prefill_whole(self, job: PrefillJob, why: str) -> None:
        job.request.prefilling = f"prefilled whole: {why}"
