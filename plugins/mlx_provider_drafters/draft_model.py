"""A smaller model that drafts for a larger one: greedily, with one pass of all rows per draft. It
reads up to `LONGEST` of a row's last tokens, in pieces between the larger model's steps. Rows that
exceed `KV_BYTES` are not followed until another row has ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from mlx_provider import PrefillChunk, Prompt
from mlx_provider.families.caches import KVCache, RotatingKVCache
from mlx_provider.families.text import TextModel
from mlx_provider.families.trial import failure
from mlx_provider.records import DeviceTokens, DraftRow

from .packed_rows import Stale, packed_rows
from .prompt_scoring import ScoringModel, token_bytes
from .row_context import AHEAD, MOST_ADDED, RowContext, longest

PIECE = 256
"""Prompt tokens per call: about a step of the larger model."""
KV_BYTES = 2**31
"""Limit of all rows' caches; one row is always followed."""
CLOSE = 0.05
"""Tolerance of logits in a batch, as a share of the largest one."""

Followed = tuple[DraftRow, RowContext]


class DraftModel(ScoringModel):
    def __init__(
        self, model: TextModel, vocab: int, *, context: int | None = None, kv_bytes: int = KV_BYTES
    ) -> None:
        """`vocab`: of the larger model; `context`: maximum tokens of a row that are read."""
        super().__init__(model, vocab)
        self._context = min(longest(model.make_cache()), context or model.info.context_length)
        each = self._context * token_bytes(model, KVCache, RotatingKVCache)
        self._places = max(1, kv_bytes // each)
        self.kv_bytes = self._places * each
        self._followed: WeakSet[RowContext] = WeakSet()
        self._together = not failure(self._alike)
        self.drafts_ahead = self._together and not failure(self._alike_ahead)

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int] | None]:
        contexts = [self._context_of(row) for row in rows]
        followed = [(row, own) for row, own in zip(rows, contexts, strict=True) if own is not None]
        left = PIECE
        for row, own in followed:
            left -= self._read(row, own, left)
        guesses = self._guesses(
            [(row, own) for row, own in followed if len(row.tokens) - own.known <= AHEAD]
        )
        return [
            () if own is None else guesses.get(id(row))
            for row, own in zip(rows, contexts, strict=True)
        ]

    def _context_of(self, row: DraftRow) -> RowContext | None:
        own: RowContext | None = row.state
        if own is None:
            if len(self._followed) >= self._places:
                return None
            own = row.state = RowContext(self._model.make_cache())
            self._followed.add(own)
        own.follow(row.tokens, row.unread)
        if len(row.tokens) + MOST_ADDED - own.begin > self._context:
            own.start_again(self._model.make_cache(), len(row.tokens) - self._context // 2)
        return own

    def _read(self, row: DraftRow, own: RowContext, most: int) -> int:
        """Read the tokens before those of the first guess. Returns their number."""
        gap = len(row.tokens) - own.known
        count = min(gap - 1, most) if gap > AHEAD else 0
        if count:
            mx.eval(self._after(own, row.tokens[own.known : own.known + count]))
            own.known += count
        return count

    def _guesses(self, ready: Sequence[Followed]) -> dict[int, DeviceTokens]:
        if self._together:
            return self._guess(sorted(ready, key=lambda each: -each[0].wanted))
        return {name: own for each in ready for name, own in self._guess([each]).items()}

    def _guess(self, ready: Sequence[Followed]) -> dict[int, DeviceTokens]:
        """One pass for all; rows with the most drafts first."""
        if not ready:
            return {}
        owns = [own for _, own in ready]
        new = [_new(row, own) for row, own in ready]
        guesses = [self._best(owns, mx.concatenate(new), [each.size for each in new])]
        for done in range(1, ready[0][0].wanted):
            going = [own for row, own in ready if row.wanted > done]
            guesses.append(self._best(going, guesses[-1][: len(going)]))
        found = {}
        for i, (row, own) in enumerate(ready):
            drafts = mx.concatenate([each[i : i + 1] for each in guesses[: row.wanted]])
            found[id(row)] = DeviceTokens(drafts)
            own.guessed_behind(len(row.tokens), found[id(row)].first(row.wanted - 1))
        return found

    def _best(
        self, owns: Sequence[RowContext], tokens: mx.array, counts: Sequence[int] = ()
    ) -> mx.array:
        """Most likely next tokens, (rows,) int32. `counts`: new tokens of each row, of which the
        last ones can be unread; by default one guess per row."""
        stale = [own.stale for own in owns]
        caches = [own.cache for own in owns]
        if counts:
            logits = self._pass(caches, tokens, counts, ending=stale)
        else:
            logits = self._pass(caches, tokens, [1] * len(owns), before=stale)
        best = mx.argmax(logits[:, : self._shared], axis=-1).astype(mx.int32)
        mx.async_eval(best)  # type: ignore[no-untyped-call]
        return best

    def _pass(
        self,
        caches: Sequence[list[Any]],
        tokens: mx.array,
        counts: Sequence[int],
        *,
        ending: Stale = (),
        before: Stale = (),
    ) -> mx.array:
        """Append `counts` tokens to each row's cache. Returns logits (rows, vocab) after the last
        accepted ones. `ending`: rejected new tokens of each row; `before`: rejected tokens in its
        cache."""
        rows = len(caches)
        ending, before = ending or [None] * rows, before or [None] * rows
        known = mx.minimum(tokens, self._model.info.vocab_size - 1)
        if rows == 1 and all(each is None for each in (*ending, *before)):
            found: mx.array = self._model.model(known[None], cache=caches[0])
            return found[:, -1]
        starts = [
            _less(cache[0].offset, stale) for cache, stale in zip(caches, before, strict=True)
        ]
        runs = zip(starts, counts, strict=True)
        positions = mx.concatenate([start + mx.arange(count) for start, count in runs])
        ends = zip(accumulate(counts), ending, strict=True)
        last = mx.concatenate([_less(end - 1, stale) for end, stale in ends])
        packed = packed_rows(caches, counts, positions, before)
        return self._model.decode(known, packed, positions, last)

    def _after(self, own: RowContext, tokens: Sequence[int]) -> mx.array:
        """Append a piece of a prompt. Returns logits (vocab,)."""
        last = self._model.info.vocab_size - 1
        prompt = Prompt([min(token, last) for token in tokens])
        return self._model.prefill(PrefillChunk(prompt, 0, len(tokens), own.cache))

    def _alike(self) -> str:
        """Why rows in one pass differ from each row alone; empty: they do not."""
        new = [[3, 1, 4], [1, 5]]
        alone, company = ([self._read_some(n) for n in (9, 2)] for _ in range(2))
        apart = [
            self._pass([each], mx.array(own), [len(own)])
            for each, own in zip(alone, new, strict=True)
        ]
        one = mx.concatenate(apart)
        other = self._pass(company, mx.array([*new[0], *new[1]]), [3, 2])
        most = CLOSE * mx.max(mx.abs(one))
        return "" if mx.all(mx.abs(one - other) <= most).item() else "other logits"

    def _alike_ahead(self) -> str:
        """Why a guess after rejected tokens differs from one without them; empty: it does not."""
        alone, company = self._read_some(9), self._read_some(9)
        one = [self._pass([alone], mx.array(new), [len(new)]) for new in ([3, 1], [7])]
        stale = [mx.array([1])]
        first = self._pass([company], mx.array([3, 1, 4]), [3], ending=stale)
        other = [first, self._pass([company], mx.array([7]), [1], before=stale)]
        apart, most = mx.abs(mx.concatenate(one) - mx.concatenate(other)), mx.abs(one[0])
        return "" if mx.all(apart <= CLOSE * mx.max(most)).item() else "other logits"

    def _read_some(self, count: int) -> list[Any]:
        own = RowContext(self._model.make_cache())
        mx.eval(self._after(own, range(count)))
        return own.cache


def _new(row: DraftRow, own: RowContext) -> mx.array:
    """The row's tokens that are not in its cache, (n,) int32; unread ones last."""
    known = mx.array(row.tokens[own.known :], mx.int32)
    own.unread = row.unread
    return known if row.unread is None else mx.concatenate([known, row.unread.tokens])


def _less(place: int, stale: mx.array | None) -> mx.array:
    return mx.array([place], mx.int32) if stale is None else place - stale
