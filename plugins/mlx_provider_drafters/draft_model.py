"""Rows of different lengths in one pass, each with its own cache and some tokens.

The tokens of one row that a draft model has read, in a cache that can remove rejected ones.

A smaller model that drafts for a larger one: greedily, with one pass of all rows per draft. It
reads up to `LONGEST` of a row's last tokens, in pieces between the larger model's steps. Rows that
exceed `KV_BYTES` are not followed until another row has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from mlx_provider import PrefillChunk, Prompt
from mlx_provider.families.caches import KVCache, RotatingKVCache, append_behind, visible_behind
from mlx_provider.families.logits import failure
from mlx_provider.families.text import TextModel
from mlx_provider.records import DeviceTokens, DraftRow, Parts, Run, Unread

from .prompt_scoring import ScoringModel, token_bytes

Stale = Sequence[mx.array | None]
"""Per row: rejected tokens at the end of its cache, (1,) int32, not read by the host. The row's one
new token overwrites them. `None`: none."""


def packed_rows(
    caches: Sequence[list[Any]], counts: Sequence[int], positions: mx.array, stale: Stale
) -> list[Any]:
    """The rows' caches in the form for the model, layer by layer. The model treats each of a row's
    `counts` tokens as a row. `positions`: (tokens,) int32."""
    edges = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    places = [slice(*edge) for edge in edges]
    return [PackedLayer(layer, places, positions, stale) for layer in zip(*caches, strict=True)]


class PackedLayer:
    """One layer. Attention must be patched (`mlx_provider.families.layers`)."""

    def __init__(
        self, caches: Sequence[Any], places: Sequence[slice], offset: mx.array, stale: Stale
    ) -> None:
        self.offset = offset
        self._stale = stale
        self._runs = [
            Run(cache, place, turned=True) for cache, place in zip(caches, places, strict=True)
        ]

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> list[Any]:
        """One mask per row. `N`: tokens per row for the model, always 1."""
        return [
            run.cache.make_mask(_count(run), *args, **kwargs)
            if stale is None
            else visible_behind(run.cache, run.cache.offset - stale, kwargs.get("window_size"))
            for run, stale in zip(self._runs, self._stale, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (tokens, heads, 1, D): to each row its tokens, as (1, heads, tokens, D)."""
        pairs = [
            _append(run, stale, keys[run.rows].swapaxes(0, 2), values[run.rows].swapaxes(0, 2))
            for run, stale in zip(self._runs, self._stale, strict=True)
        ]
        all_keys, all_values = (list(each) for each in zip(*pairs, strict=True))
        return Parts(all_keys, self._runs), Parts(all_values, self._runs)


def _append(
    run: Run, stale: mx.array | None, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    if stale is not None:
        return append_behind(run.cache, keys, values, stale)
    found: tuple[mx.array, mx.array] = run.cache.update_and_fetch(keys, values)
    return found


def _count(run: Run) -> int:
    return int(run.rows.stop - run.rows.start)


LONGEST = 4096
"""Last tokens of a row that are read, so that memory and time to the first draft do not grow with a
prompt."""
MIN_WINDOW_TOKENS = 256
AHEAD = 8
"""Tokens that one call adds: a row's new one and its drafts."""
MOST_ADDED = 2 * AHEAD
"""Includes the tokens of the last pass, accepted or not."""


def longest(cache: Sequence[Any]) -> int:
    """Length up to which the last tokens can be removed from every layer; 0: never. A window can
    remove tokens until it has wrapped (mlx_lm/models/cache.py 0.32.2)."""
    kinds = {type(layer) for layer in cache}
    windows = [layer.max_size for layer in cache if isinstance(layer, RotatingKVCache)]
    least = min([LONGEST, *windows])
    return least if kinds <= {KVCache, RotatingKVCache} and least >= MIN_WINDOW_TOKENS else 0


class RowContext:
    def __init__(self, cache: list[Any]) -> None:
        self.cache = cache
        self.begin = 0
        """Index in the row of the cache's first token."""
        self.known = 0
        """Tokens of the row, from its first on, that need no reading."""
        self.guessed: Sequence[int] = ()
        """Tokens in the cache after the known ones."""
        self.unread: Unread | None = None
        """The result whose tokens, accepted or not, follow in the cache."""

    @property
    def stale(self) -> mx.array | None:
        """Rejected tokens at the cache's end, (1,) int32; `None`: none."""
        if self.unread is None or self.unread.tokens.size == 1:
            return None
        return self.unread.tokens.size - 1 - self.unread.held

    def settle(self) -> None:
        """Keep the accepted ones of the unread tokens. Raises `ValueError` if their number is not
        known yet."""
        if self.unread is None:
            return
        if self.unread.read is None:
            raise ValueError("a row is asked for again before its result is read")
        self._take_back(self.unread.tokens.size - 1 - self.unread.read)
        self.known += self.unread.read + 1
        self.unread = None

    def follow(self, tokens: Sequence[int], unread: Unread | None) -> None:
        """Keep the accepted guesses. The row's last token must be read (again), unless `unread`
        ones follow it."""
        self.settle()
        new = tokens[self.known : self.known + len(self.guessed)]
        pairs = enumerate(zip(new, self.guessed, strict=False))
        held = next((i for i, (token, guess) in pairs if guess != token), len(new))
        stay = min(self.known + held, len(tokens) - (unread is None))
        self._take_back(self.known + len(self.guessed) - stay)
        self.known, self.guessed = stay, ()

    def guessed_behind(self, known: int, guesses: Sequence[int]) -> None:
        self.known, self.guessed = known, guesses
        if self.unread is not None:  # the number of accepted guesses is known too late
            self._take_back(len(guesses))
            self.guessed = ()

    def start_again(self, cache: list[Any], begin: int) -> None:
        self.cache, self.begin, self.known, self.guessed = cache, begin, begin, ()

    def _take_back(self, tokens: int) -> None:
        for layer in self.cache:
            layer.trim(tokens)


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
