"""How the engine of one model uses the prefix cache, and where in a prompt it takes snapshots.

Snapshots are taken at message ends, image ends, and points where a prompt left a stored path (as in
Marconi, MLSys 2025). In long new text, some are guesses for another question about the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from ...records import LoadedModel, Prompt
from ..memory import MemoryProfile, profile
from ..request import PrefillJob, Request, Row
from ..row_cache import Kind
from ..sizes import STEP_TOKENS, FixedShapes
from .buffers import Lease, divisible, own_layers
from .cache import PrefixCache
from .store import NEAR, RECENT
from .tree import CacheKey, Ids, Match, as_ids, key_tokens, outside_spans

GRID = 64
"""Prefill passes start on multiples of this. The result does not change if a pass ends on one."""
WORTH_A_PASS = 64
"""Tokens that a snapshot must save: it needs its own pass, and reading the weights again costs as
much time as some tens to hundreds of tokens."""
WORTH_A_GUESS = 512
"""The same for guesses, of which about one in ten is used."""
GUESSED = (16, 4)
"""A guess is this fraction (1/n) of the new tokens before the end: for a short question after a
long text, and for one after its first pages."""
WORTH_KEEPING = 32
"""A cancelled prefill with fewer tokens is not stored."""
AROUND = 8
"""Tokens in a report on either side of the point where a prompt left the stored path."""


class PrefixCachePolicy:
    """Engine thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        kv: str,
        make_cache: Callable[[], list[Any]],
        *,
        in_place: bool = False,
        least: int | None = None,
        memory: MemoryProfile | None = None,
    ) -> None:
        """`in_place`: rows use the buffers of entries. `least`: fewest tokens that several rows
        share; `None`: they share none."""
        self._leases = cache.leases(least) if in_place else None
        self._least = least
        self._forks = divisible(own_layers(make_cache()))
        self._cache = cache
        self._model = model
        self._kv = kv
        self._make_cache = make_cache
        self._strictest = cache.strictest(make_cache())
        self._grid = 1
        """A prefix is used only up to a multiple of this."""
        self._memory = memory
        """`None` before the first row."""

    def look_up(self, job: PrefillJob) -> None:
        if job.ids is None:
            job.ids = as_ids(key_tokens(job.prompt))
        key = self._key(job.request)
        job.match = self._match(key, job.ids)
        on_disk = self._cache.on_disk(key, job.ids, self._make_cache, 0, self._grid)
        beyond = 0 if on_disk is None else on_disk.available
        job.estimated_cached = max(job.match.length, beyond)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def pays_ahead(self, job: PrefillJob) -> bool:
        """Whether a queued background prefill has more than a few tokens to compute, and less than
        it finds stored."""
        few = len(job.tokens) - max(job.match.shared, job.estimated_cached) <= NEAR
        return not few and job.cost <= job.estimated_cached

    def _match(self, key: CacheKey, ids: Ids) -> Match:
        return self._cache.match(key, ids, limit=len(ids) - 1)

    def claim(self, job: PrefillJob) -> None:
        """Let a queued prompt hold what it will use of the prefix cache in place."""
        if self._leases is None or not job.uses_prefix_cache or job.match is None:
            return
        if not self._cache.holds(job.match):
            self.look_up(job)
        if job.estimated_cached == job.match.length:  # else more of it comes from disk, as copies
            job.rows[0].lease = self._leases.claim(job.match)
        self._claim_forks(job)

    def trim(self, row: Row, tokens: int) -> None:
        if self._leases is not None and row.lease is not None:
            self._leases.trim(row.lease, tokens)

    def _claim_forks(self, job: PrefillJob) -> None:
        first, further = job.rows[0].lease, len(job.rows) - 1
        nbytes = self.fork_bytes(len(job.tokens), further + 1) // max(1, further)
        if first is not None and first.base is not None:
            nbytes = min(nbytes, first.base.stored)
        for row in job.rows[1:]:
            row.lease = Lease(claimed_bytes=nbytes) if nbytes else None

    def fork_bytes(self, tokens: int, rows: int) -> int:
        if self._least is None or not self._forks or tokens <= self._least:
            return 0
        each = 0 if self._memory is None else self._memory.token_bytes
        # what is left of a step may be one more step of each row's own tokens
        steps = (rows - 1) * ((tokens - 1) // STEP_TOKENS) - 1
        return max(0, steps) * STEP_TOKENS * each

    def fork(self, rows: Sequence[Row], cache: list[Any]) -> list[list[Any]]:
        first, caches = rows[0].lease, [cache]
        for row in rows[1:]:
            if first is None or self._leases is None:
                copied, row.lease = deepcopy(cache), None
            else:
                copied, row.lease = self._leases.fork(first, cache)
            caches.append(copied)
        return caches

    def begin(self, job: PrefillJob, room: int) -> Match | None:
        """Give the job a cache for `room` tokens that holds the longest stored prefix. Returns the
        match, unless it was already reported. If the disk has more than memory, the job is
        `restoring` at first. Call it again after that."""
        if job.match is None or not self._cache.holds(job.match):
            self.look_up(job)
        if job.restore is None:
            key = self._key(job.request)
            on_disk = self._cache.on_disk(key, job.ids, self._make_cache, room, self._grid)
            if on_disk is not None and on_disk.available:
                job.restore = on_disk.start()
                return None
        match: Match = job.match
        job.match = None
        if self._leases is not None and self._leases.prepare(match):
            match = self._match(self._key(job.request), job.ids)
        match = replace(match, counted=not job.request.ahead)
        restored = job.restore
        if restored is not None and restored.cache is not None:
            job.cache, restored.cache = restored.cache, None
            self._cache.count(match, restored.length)
            match = replace(
                match, length=restored.length, shared=max(match.shared, restored.length)
            )
            job.rows[0].lease = None if self._leases is None else self._leases.lease(job.cache)
        else:
            job.cache, job.rows[0].lease = self._cache.acquire(
                match, self._make_cache, room=room - match.length, leases=self._leases
            )
        self._claim_forks(job)
        job.done = match.length
        if len(job.tokens) != len(job.request.prompt.tokens):
            return None
        self._plan_snapshots(job, match.length, match.branch)
        if any(row.tokens for row in job.rows):
            return None
        job.request.cached = match.length
        job.request.explanation = self._explained(job, match)
        return match

    def preview(self, job: PrefillJob) -> tuple[int, Sequence[int]] | None:
        """The tokens with which `begin` would let a job start, and where its passes must end.
        `None`: it would wait for the disk. May look the job up again."""
        if job.match is None or not self._cache.holds(job.match):
            self.look_up(job)
        match: Match = job.match
        start, branch = match.length, match.branch
        if job.restore is not None and job.restore.cache is not None:
            start = job.restore.length
        elif job.restore is None and job.estimated_cached > start:
            return None
        if self._ends_passes and len(job.tokens) == len(job.request.prompt.tokens):
            return start, self._places(job, start, branch, GRID)
        return start, job.cuts

    @property
    def _ends_passes(self) -> bool:
        """If a layer has a state, a pass ends at each snapshot."""
        return self._strictest is Kind.STATE

    def _plan_snapshots(self, job: PrefillJob, start: int, branch: int = 0) -> None:
        if self._strictest is not Kind.APPEND:
            job.keeps = self._places(job, start, branch, GRID if self._ends_passes else 1)
        if self._ends_passes:
            job.cuts = job.keeps

    def _places(self, job: PrefillJob, start: int, branch: int, grid: int) -> tuple[int, ...]:
        """Positions in memory as far as it holds the prompt, on disk for all of it."""
        prompt, fits = job.prompt, self._fits(job)
        found = places(prompt, start, branch, grid=grid, fits=fits)
        if fits is None or fits >= len(prompt.tokens) or self._cache.disk is None:
            return found
        return tuple(sorted({*found, *places(prompt, start, branch, grid=grid)}))

    def _fits(self, job: PrefillJob) -> int | None:
        """Tokens of a row that the prefix cache can hold, once the memory of a row is known."""
        if self._memory is None and job.done:
            self._memory = profile(job.held())
        return None if self._memory is None else self._cache.fits(self._memory, job.request.session)

    def passed(self, job: PrefillJob, start: int) -> None:
        if self._memory is None and self._strictest is not Kind.APPEND:
            self._plan_again(job)
        if job.ids is not None:
            ids = job.ids[: self._whole(job.done)]
            self._cache.save_head(self._key(job.request), ids, job.held(), start)
        for at in job.keeps:
            if start < at <= job.done:
                inside = at not in self._ends(job.prompt)
                within = None if at == job.done else at
                snapshot = self._cache.snapshot(job.held(), within, inside=inside)
                if snapshot is not None:
                    job.snapshots[at] = snapshot

    def _whole(self, done: int) -> int:
        """The part of `done` prefilled tokens that may be stored."""
        return done

    def _plan_again(self, job: PrefillJob) -> None:
        """Plan again after the first pass of all, which shows the memory of a row."""
        fits = self._fits(job)
        if fits is not None and fits < len(job.request.prompt.tokens):
            taken = [at for at in job.keeps if at <= job.done]
            self._plan_snapshots(job, job.done)
            job.keeps = [*taken, *job.keeps]

    def _ends(self, prompt: Prompt) -> set[int]:
        return ends_of(prompt)

    def keep_prefill(self, job: PrefillJob) -> None:
        """If tokens were left out, the tokens after them differ from those of other prompts."""
        whole = job.ids is not None and job.places is None
        if job.cache is not None and whole and job.done >= WORTH_KEEPING:
            self._insert(
                job.request, job.ids[: job.done], job.cache, job.snapshots,
                lease=job.rows[0].lease,
            )  # fmt: skip

    def keep_row(self, row: Row, tokens: Sequence[int], cache: list[Any]) -> None:
        """The row has ended. Its cache holds the prompt and these tokens of the reply."""
        if row.request.kept is not None:
            return
        prompt = as_ids(key_tokens(row.request.prompt))
        ids = np.concatenate([prompt, as_ids(tokens)])
        awaited = row.finish == "tool_calls" or row.request.retain
        self._insert(row.request, ids, cache, {}, awaited=awaited, lease=row.lease)

    def _insert(
        self,
        request: Request,
        ids: Ids,
        cache: list[Any],
        snapshots: dict[int, Any],
        **more: Any,
    ) -> None:
        """`more`: see `PrefixCache.insert`."""
        prompted = len(request.prompt.tokens)
        stored = self._cache.insert(
            self._key(request), ids, cache, snapshots, prompted=prompted, session=request.session,
            **more,
        )  # fmt: skip
        request.stored = max(request.stored, min(stored, prompted) - request.cached)

    def give_back(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._leases is not None and row.lease is not None:
                self._leases.release(row.lease)

    def settle(self, rows: Iterable[Row], cache_of: Callable[[Row], Sequence[Any] | None]) -> None:
        """The layout may have merged rows."""
        self.give_back(row for row in rows if row.lease is not None and cache_of(row) is None)

    def _key(self, request: Request) -> CacheKey:
        return CacheKey(self._model.info.fingerprint, self._kv, request.salt)

    def _explained(self, job: PrefillJob, match: Match) -> str:
        at = match.diverged_at
        if at is None or match.stored_token is None:
            return ""
        here = self._text(job.tokens[max(0, at - AROUND) : at + AROUND])
        stored = self._text([match.stored_token])
        return (
            f"left the stored prefix at token {at} of {match.asked}: ...{here!r}, there {stored!r}"
        )

    def _text(self, tokens: Sequence[int]) -> str:
        real = [t for t in tokens if t >= 0]
        return self._model.tokenizer.decode(real, skip_special=False) if real else "<media>"


class WholePasses(PrefixCachePolicy):
    """The policy of a reproducible model: stores only what a prefill would compute.

    Kernels round by the width of a pass, so only prefixes of whole passes count. The last pass of a
    prompt is not stored, and neither is a reply, whose tokens ran one by one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        kv: str,
        make_cache: Callable[[], list[Any]],
        shapes: FixedShapes,
    ) -> None:
        """`kv`: must differ between all configurations that may compute different bits."""
        super().__init__(cache, model, f"{kv}, whole passes of {shapes.tokens}", make_cache)
        self._shapes = shapes
        self._grid = shapes.tokens

    def keep_prefill(self, job: PrefillJob) -> None:
        whole = self._shapes.whole(job.done)
        if job.cache is not None and whole:
            beyond = job.done > whole
            self._insert(job.request, job.ids[:whole], job.cache, job.snapshots, beyond=beyond)

    def keep_row(self, row: Row, tokens: Sequence[int], cache: list[Any]) -> None:
        """The prompt was stored when the row joined."""

    def _match(self, key: CacheKey, ids: Ids) -> Match:
        found = usable = super()._match(key, ids)
        while at := usable.length % self._shapes.tokens:
            usable = self._cache.match(key, ids, limit=usable.length - at)
        # the longest stored path shows where the prompt leaves it
        return replace(found, length=usable.length, stateful=usable.stateful)

    def _whole(self, done: int) -> int:
        return self._shapes.whole(done)

    @property
    def _ends_passes(self) -> bool:
        return False

    def _plan_snapshots(self, job: PrefillJob, start: int, branch: int = 0) -> None:
        """Snapshots at the ends of passes. No pass ends for a snapshot."""
        if self._strictest is Kind.APPEND:
            return
        prompt, grid = job.prompt, self._shapes.tokens
        every = self._places(job, start, branch, grid)
        wanted = {self._shapes.whole(at) for at in every}
        wanted.add(self._last(prompt))
        job.keeps = sorted(at for at in wanted if at > start and outside_spans(job.ids, at) == at)

    def _ends(self, prompt: Prompt) -> set[int]:
        return {self._shapes.whole(at) for at in ends_of(prompt)} | {self._last(prompt)}

    def _last(self, prompt: Prompt) -> int:
        """The position where the next turn of a conversation, or the same prompt, resumes."""
        return self._shapes.whole(len(prompt.tokens) - 1)


def places(
    prompt: Prompt, done: int = 0, branch: int = 0, *, grid: int = GRID, fits: int | None = None
) -> tuple[int, ...]:
    """Ascending token counts at which to store a state.

    At most 1 + `RECENT` ends, a branch, and the guesses of `GUESSED`. `done`: tokens with which the
    row resumes. `branch`: tokens before the prompt leaves another one. `grid`: positions are
    rounded down to it. `fits`: tokens that the prefix cache can hold; a longer prompt has a state
    there.
    """
    total = len(prompt.tokens)
    stop = total if fits is None else min(fits, total)
    every = [end for end in cuts_of(prompt, done) if end <= stop]
    ends = {*every[:1], *every[1:][-RECENT:]}
    before = max((end for end in ends if end <= branch), default=done)
    at = branch // grid * grid
    if at - before >= WORTH_A_PASS and not _inside_media(prompt, at):
        ends.add(at)
    last = stop // grid * grid
    if stop < total and last - max(ends, default=done) >= WORTH_A_PASS:
        ends |= set() if _inside_media(prompt, last) else {last}
    fresh = 2 * done < total  # a conversation that continues will probably continue again
    guesses = _guesses(prompt, max(done, at), ends, stop) if fresh else set()
    return tuple(sorted(ends | guesses))


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Image ends, and the message ends that save more than a pass costs, counted from the previous
    state. `done`: tokens with which the row resumes."""
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted(ends_of(prompt)):
        far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (far or end in images):
            cuts.append(end)
    return tuple(cuts)


def ends_of(prompt: Prompt) -> set[int]:
    return {span.end for span in prompt.spans} | {*prompt.snapshot_points}


def _guesses(prompt: Prompt, start: int, states: Iterable[int], stop: int) -> set[int]:
    """Positions before the end of the last message, last first, far from any other state."""
    end = min(stop, max(prompt.snapshot_points, default=stop))
    held, found = {start, *states}, set[int]()
    for part in GUESSED:
        at = (end - max(GRID, (end - start) // part)) // GRID * GRID
        before = max((state for state in held if state <= at), default=at)
        near = any(at <= state < at + WORTH_A_PASS for state in held)
        close = any(guess - at < WORTH_A_GUESS for guess in found)
        worth = at - before >= WORTH_A_GUESS and not near and not close
        if worth and not _inside_media(prompt, at):
            found.add(at)
    return found


def _inside_media(prompt: Prompt, at: int) -> bool:
    return any(span.start < at < span.end for span in prompt.spans)
