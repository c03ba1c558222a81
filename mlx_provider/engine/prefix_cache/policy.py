"""How the engine of one model uses the prefix cache."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from weakref import WeakSet

import numpy as np

from ...isolation import isolate_use
from ...records import LoadedModel
from ...upstream.shared_kv import SHAREABLE
from ..request import PrefillJob, Request, Row
from ..row_cache import Kind, append_layers, strictest
from ..scheduling.chunking import FixedShapes
from ..scheduling.ledger import STEP_TOKENS, MemoryProfile, PrefixOffers
from .buffers import Claim, Lease, Reuse, RowBuffers
from .cache import PrefixCache
from .disk import Restore
from .snapshots import GRID, NEAR, choose_snapshots
from .tree import CacheKey, Ids, Match, as_ids, key_tokens, outside_spans

WORTH_KEEPING = 32
"""A prefill with fewer tokens is not stored. For a reproducible model, one whole pass suffices."""
AROUND = 8
"""Tokens in a report on either side of the point where a prompt left the stored path."""
isolate = partial(isolate_use, "the prefix cache")
"""A fault costs only this use of the prefix cache, or the entry."""


def lose_buffers(user: PrefillJob | Row) -> None:
    """Of a row that could not be stored. What it shares of others is intact."""
    lease = user.lease if isinstance(user, Row) else user.rows[0].lease
    if lease is not None:
        lease.row, lease.capacity = None, 0


class PrefixCachePolicy(PrefixOffers):
    """Engine thread only. In the order of calls: `look_up` when a prompt is queued, `offers` while
    it waits, `lease` when it is admitted, `begin` before its first pass, `after_pass` after each
    one, `keep_prefill` and `fork` after the last one, `detach` when rows are merged, `keep_row` and
    `release` when a row ends or is preempted.

    For a reproducible model it stores only what a prefill would compute. Kernels round by the width
    of a pass, so only prefixes of whole passes count. The last pass of a prompt is not stored, and
    neither is a reply, whose tokens ran one by one."""

    def __init__(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        kv: str,
        make_cache: Callable[[], list[Any]],
        *,
        in_place: bool = False,
        min_shared: int | None = None,
        memory: MemoryProfile | None = None,
        shapes: FixedShapes | None = None,
    ) -> None:
        """`in_place`: rows use the buffers of entries. `min_shared`: fewest tokens that several
        rows share; `None`: they share none. `shapes`: of a reproducible model; `kv` must then
        differ between all configurations that may compute different bits. `memory`: of a row;
        `None`: prompts are taken to fit the prefix cache."""
        types = {type(layer) for layer in append_layers(make_cache()).values()}
        shares = in_place and min_shared is not None and types and types <= {*SHAREABLE}
        self._min_shared = max(1, min_shared or 0) if shares else inf
        self._reuse = Reuse(cache.totals, in_place, self._min_shared)
        self.cache = cache
        self._model = model
        self._kv = kv if shapes is None else f"{kv}, whole passes of {shapes.tokens}"
        self._make_cache = make_cache
        self._strictest = strictest(make_cache())
        self._ends_passes = self._strictest is Kind.STATE and shapes is None
        """If a layer has a state, a pass ends at each snapshot. Fixed passes never do."""
        self._shapes = shapes
        self._grid = 1 if shapes is None else shapes.tokens
        """A prefix is stored and used only up to a multiple of this."""
        self._memory = memory
        self._unread: list[WeakSet[RowBuffers]] = [WeakSet(), WeakSet()]
        """Buffers of rows that ended since the read before the last one, and since the last."""

    def _look_up(self, job: PrefillJob) -> Match:
        self.cache.totals.remove_lost()
        match, job.estimated_cached = self._find(job)
        job.match = match
        return match

    look_up = isolate()(_look_up)

    def _find(self, job: PrefillJob) -> tuple[Match, int]:
        """The match, which is a new one if the prefix cache has changed, and the tokens that will
        not be computed. Sets neither in the job."""
        if job.match is not None and self.cache.is_valid(job.match):
            return job.match, job.estimated_cached
        key, disk = self._key(job.request), self.cache.disk
        match = self._match(job)
        on_disk = 0 if disk is None else disk.find(key, self._ids(job), match, self._grid)[0]
        return match, max(match.length, on_disk)

    def _match(self, job: PrefillJob) -> Match:
        ids = self._ids(job)
        return self.cache.match(self._key(job.request), ids, len(ids) - 1, self._grid)

    def _ids(self, job: PrefillJob) -> Ids:
        if job.ids is None:
            job.ids = as_ids(key_tokens(job.prompt))
        return job.ids

    def pays_in_background(self, job: PrefillJob) -> bool:
        """Whether more than `NEAR` of its tokens are not stored, and at least half are reusable."""
        known = 0 if job.match is None else job.match.shared  # `None`: the look-up failed
        few = len(job.tokens) - max(known, job.estimated_cached) <= NEAR
        return not few and job.tokens_left <= job.estimated_cached

    @isolate(lambda job: ())
    def offers(self, job: PrefillJob) -> Sequence[Lease | None]:
        """What rows of a queued prompt will use of the cache in place. Changes nothing."""
        if not job.uses_prefix_cache or job.ids is None:
            return ()
        match, estimated = self._find(job)
        copies = estimated > match.length  # from disk, and also what memory has
        first = None if copies else self._reuse.claim(match, len(job.rows))
        return first, *self._forks(job, first)

    @isolate()
    def lease(self, job: PrefillJob) -> None:
        """Acquire the leases of `offers` for the rows of a queued prompt."""
        for row, lease in zip(job.rows, self.offers(job), strict=False):
            row.lease = lease and lease.acquire()

    def fork_bytes(self, tokens: int, rows: int) -> int:
        """Bytes that so many rows of a prompt save because they share its tokens."""
        if self._memory is None or tokens <= self._min_shared:
            return 0
        # what is left of a step may be one more step of each row's own tokens
        steps = (rows - 1) * ((tokens - 1) // STEP_TOKENS) - 1
        return max(0, steps) * STEP_TOKENS * self._memory.token_bytes

    @isolate(PrefillJob.leave_prefix)
    def begin(self, job: PrefillJob, capacity: int) -> Match | None:
        """Give the job a cache for `capacity` tokens that holds the longest stored prefix. If the
        disk has more than memory, the job is `restoring` at first. Call it again after that.
        Returns the match if it is to be reported: not again for rows that were preempted."""
        match, disk = self._look_up(job), self.cache.disk
        job.rows[0].lease = None  # a claim, whose buffers no row could take over
        if disk is not None and job.restore is None and job.estimated_cached > match.length:
            key, ids, found = self._key(job.request), self._ids(job), partial(self._match, job)
            fill = disk.fill(key, ids, found, self._make_cache, capacity, self._grid)
            job.restore = Restore(disk, fill)
            return None
        is_first = not (job.request.background or job.request.looked_up)
        match = self._acquire(job, match, capacity, is_first)
        job.computed_tokens = match.length
        if len(job.tokens) != len(job.request.prompt.tokens):
            return None  # a row resumes with its reply
        if self._strictest is not Kind.APPEND:
            job.snapshots_at = self._choose_snapshots(job, match.length, match.branch)
        if self._ends_passes:
            job.cuts = job.snapshots_at
        if any(row.tokens for row in job.rows):
            return None
        job.request.cached_tokens = match.length
        job.request.explanation = self._explain(job, match)
        return match if is_first else None

    def _acquire(self, job: PrefillJob, match: Match, capacity: int, is_first: bool) -> Match:
        """Give the job its cache, and its rows their leases. `is_first`: it counts as a look-up."""
        job.match, job.request.looked_up, restored = None, True, job.restore
        if restored is not None and restored.cache is not None:  # memory had a part of it
            cache, restored.cache, length = restored.cache, None, restored.length
            self.cache.count_use(match, length, count_lookup=is_first)
            match = replace(match, length=length, shared=max(match.shared, length))
            first = self._reuse.lease_row(cache)
        else:
            cache, first = self.cache.acquire(
                match, self._make_cache, room=capacity - match.length, reuse=self._reuse,
                rows=len(job.rows), count_lookup=is_first,
            )  # fmt: skip
        job.cache = cache
        for row, lease in zip(job.rows, (first, *self._forks(job, first)), strict=True):
            row.lease = lease
        return match

    def copies_after(self, job: PrefillJob, start: int, stop: int) -> bool:
        """Whether `after_pass` may read the row's cache after this chunk."""
        disk = None if job.ids is None else self.cache.disk
        writes = disk is not None and disk.due(start, self._whole(stop))
        return writes or any(start < at <= stop for at in job.snapshots_at)

    @isolate()
    def after_pass(self, job: PrefillJob, start: int) -> None:
        if job.ids is not None:
            ids = job.ids[: self._whole(job.computed_tokens)]
            self.cache.save_prefill(self._key(job.request), ids, job.row_cache(), start)
        for at in job.snapshots_at:
            if start < at <= job.computed_tokens:
                within = None if at == job.computed_tokens else at
                if (snapshot := self.cache.snapshot(job.row_cache(), within)) is not None:
                    job.snapshots[at] = snapshot

    def fork(self, rows: Sequence[Row], cache: list[Any], capacity: int) -> list[list[Any]]:
        """Caches of the rows of a complete prompt: `cache`, and others of that capacity."""
        caches = [cache]
        for row in rows[1:]:
            copied, row.lease = self._reuse.fork(rows[0].lease, cache, capacity)
            caches.append(copied)
        return caches

    @isolate(lose_buffers)
    def keep_prefill(self, job: PrefillJob) -> None:
        """Store what is prefilled of a prompt. Not after sparse prefill, which gives other KV."""
        if job.cache is None or job.ids is None or job.positions is not None:
            return
        whole = self._whole(job.computed_tokens)
        if whole >= (WORTH_KEEPING if self._shapes is None else 1):
            ends_here, ids = job.computed_tokens == whole, job.ids[:whole]
            self._insert(job.rows[0], ids, job.cache, job.snapshots, ends_here=ends_here)

    @isolate(lose_buffers)
    def keep_row(self, row: Row, tokens: Sequence[int], extract: Callable[[], list[Any]]) -> None:
        """The row ended or was preempted. `extract` gives its cache: of the prompt and `tokens`."""
        if row.request.selected is not None or self._shapes is not None:
            return
        prompt = as_ids(key_tokens(row.request.prompt))
        ids = np.concatenate([prompt, as_ids(tokens)])
        awaited = row.finish == "tool_calls" or row.request.retain
        self._insert(row, ids, extract(), {}, awaited=awaited)

    def detach(self, rows: Iterable[Row], cache_of: Callable[[Row], Sequence[Any] | None]) -> None:
        """Release the leases of rows that the layout has merged."""
        own = [row for row in rows if row.lease is not None and row.lease.row is not None]
        for row in [row for row in own if cache_of(row) is None]:
            self.release(row, merged=True)

    @isolate()
    def release(self, row: Row, *, merged: bool = False) -> None:
        """Release the lease of a row that ended or was merged, and of which no pass has failed."""
        if row.lease is not None:
            self._unread[-1].update(filter(None, (row.lease.row,)))
            self.cache.release(row.lease, merged=merged)

    def record_read(self) -> None:
        """A pass has been read. A chunk that ran behind it without waiting may still fail."""
        self._unread = [self._unread[-1], WeakSet()]

    def lose_unread(self) -> set[RowBuffers]:
        """A pass has failed. Returns the buffers of rows that ended in it, which no row may use."""
        lost = {row for rows in self._unread for row in rows}
        for row in lost:
            row.intact = False
        self.record_read()
        return lost

    def _forks(self, job: PrefillJob, first: Lease | None) -> list[Lease | None]:
        """What the rows after the first will share with it: its prefix, or else all tokens."""
        further, claim = len(job.rows) - 1, Claim()
        if first is not None and first.base is not None:
            claim = Claim(None, first.base, first.base_tokens, nbytes=first.base_bytes)
        elif further:
            claim.nbytes = self.fork_bytes(len(job.tokens), further + 1) // further
        return [replace(claim) for _ in range(further)]  # a lease has one row

    def _key(self, request: Request) -> CacheKey:
        return CacheKey(self._model.info.fingerprint, self._kv, request.salt)

    def _session(self, request: Request) -> Hashable:
        """Names are the clients': those of different tenants and models are different sessions."""
        return None if request.session is None else (self._key(request), request.session)

    def _choose_snapshots(self, job: PrefillJob, start: int, branch: int) -> tuple[int, ...]:
        """Positions in memory as far as it holds the prompt, on disk for all of it."""
        prompt, storable = job.prompt, None
        if self._memory is not None:
            storable = self.cache.storable_tokens(self._memory, self._session(job.request))
        grid = GRID if self._ends_passes else self._grid
        found = {*choose_snapshots(prompt, start, branch, grid=grid, storable=storable)}
        if storable is not None and storable < len(prompt.tokens) and self.cache.disk is not None:
            found |= {*choose_snapshots(prompt, start, branch, grid=grid)}
        if self._shapes is not None:
            # the last one: where the next turn, or the same prompt, resumes by whole passes
            found = {self._whole(at) for at in (*found, len(prompt.tokens) - 1)}
            ids = self._ids(job)
            found = {at for at in found if at > start and outside_spans(ids, at) == at}
        return tuple(sorted(found))

    def _whole(self, done: int) -> int:
        """The part of `done` prefilled tokens that may be stored."""
        return done // self._grid * self._grid

    def _insert(
        self, row: Row, ids: Ids, cache: list[Any], snapshots: dict[int, Any], **more: Any
    ) -> None:
        """`more`: see `PrefixCache.insert`."""
        request, reply_at = row.request, len(row.request.prompt.tokens)
        stored = self.cache.insert(
            self._key(request), ids, cache, snapshots, reply_at=reply_at,
            session=self._session(request), lease=row.lease, **more,
        )  # fmt: skip
        new = min(stored, reply_at) - request.cached_tokens
        request.stored_tokens = max(request.stored_tokens, new)

    def _explain(self, job: PrefillJob, match: Match) -> str:
        at = match.diverged_at
        if at is None:
            return ""
        around = [token for token in job.tokens[max(0, at - AROUND) : at + AROUND] if token >= 0]
        text = self._model.tokenizer.decode(around, skip_special=False) if around else "<media>"
        return f"left the stored prefix at token {at} of {match.total}: ...{text!r}"
