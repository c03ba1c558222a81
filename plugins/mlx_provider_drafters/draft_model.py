"""A smaller model that guesses for a larger one: greedily, all rows in one pass for each draft.

It sees up to `LONGEST` of a row's last tokens, read in pieces between the larger model's steps.
Its memory is its weights and, for each row that it follows, a cache of that many tokens; rows for
which `KV_BYTES` have no room are not followed until another one has ended.
"""

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

from .packed_rows import packed_rows
from .prompt_scoring import ScoringModel, token_bytes
from .row_context import AHEAD, RowContext, longest

PIECE = 256
"""Tokens of prompts that one call reads: about a step of the larger model."""
KV_BYTES = 2**31
"""That all rows' caches may take; one row is always followed."""
CLOSE = 0.05
"""Difference of logits, as a share of the largest, that rounding may make of rows in company."""

Followed = tuple[DraftRow, RowContext]


class DraftModel(ScoringModel):
    """A `Drafting` that `ScoresPrompts`."""

    def __init__(
        self, model: TextModel, vocab: int, *, context: int | None = None, kv_bytes: int = KV_BYTES
    ) -> None:
        """`vocab`: of the larger model; `context`: tokens of a row that are read at most."""
        super().__init__(model, vocab)
        self._context = min(longest(model.make_cache()), context or model.info.context_length)
        each = self._context * token_bytes(model, KVCache, RotatingKVCache)
        self._places = max(1, kv_bytes // each)
        self.kv_bytes = self._places * each
        """That the caches of all followed rows take at most."""
        self._followed: WeakSet[RowContext] = WeakSet()
        """Rows that the engine still knows."""
        self._together = not failure(self._alike)

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
        """Where the row was left, or from where it is read; `None`: there is no room for it."""
        own: RowContext | None = row.state
        if own is None:
            if len(self._followed) >= self._places:
                return None
            own = row.state = RowContext(self._model.make_cache())
            self._followed.add(own)
        own.follow(row.tokens)
        if len(row.tokens) + AHEAD - own.begin > self._context:
            own.start_again(self._model.make_cache(), len(row.tokens) - self._context // 2)
        return own

    def _read(self, row: DraftRow, own: RowContext, most: int) -> int:
        """Read what is not the matter of the first guess; how many tokens."""
        gap = len(row.tokens) - own.known
        count = min(gap - 1, most) if gap > AHEAD else 0
        if count:
            mx.eval(self._after(own, row.tokens[own.known : own.known + count]))
            own.known += count
        return count

    def _guesses(self, ready: Sequence[Followed]) -> dict[int, DeviceTokens]:
        """Of each row, by its id."""
        if self._together:
            return self._guess(sorted(ready, key=lambda each: -each[0].wanted))
        return {name: own for each in ready for name, own in self._guess([each]).items()}

    def _guess(self, ready: Sequence[Followed]) -> dict[int, DeviceTokens]:
        """For rows in one pass, those that want most drafts first."""
        if not ready:
            return {}
        new = [row.tokens[own.known :] for row, own in ready]
        tokens = mx.array([token for each in new for token in each], dtype=mx.int32)
        guesses = [self._best([own for _, own in ready], tokens, [len(each) for each in new])]
        for done in range(1, ready[0][0].wanted):
            going = [own for row, own in ready if row.wanted > done]
            ones = [1] * len(going)
            guesses.append(self._best(going, guesses[-1][: len(going)], ones))
        found = {}
        for i, (row, own) in enumerate(ready):
            drafts = mx.concatenate([each[i : i + 1] for each in guesses[: row.wanted]])
            found[id(row)] = DeviceTokens(drafts)
            own.known, own.guessed = len(row.tokens), found[id(row)].first(row.wanted - 1)
        return found

    def _best(
        self, owns: Sequence[RowContext], tokens: mx.array, counts: Sequence[int]
    ) -> mx.array:
        """What most likely follows each row's tokens, (rows,) int32."""
        logits = self._pass([own.cache for own in owns], tokens, counts)
        best = mx.argmax(logits[:, : self._shared], axis=-1).astype(mx.int32)
        mx.async_eval(best)  # type: ignore[no-untyped-call]
        return best

    def _pass(
        self, caches: Sequence[list[Any]], tokens: mx.array, counts: Sequence[int]
    ) -> mx.array:
        """Append so many of the tokens to each row's cache; logits (rows, vocab) after them."""
        known = mx.minimum(tokens, self._model.info.vocab_size - 1)
        if len(caches) == 1:
            found: mx.array = self._model.model(known[None], cache=caches[0])
            return found[:, -1]
        starts = [cache[0].offset for cache in caches]
        places = [range(at, at + count) for at, count in zip(starts, counts, strict=True)]
        positions = mx.array([place for each in places for place in each], dtype=mx.int32)
        ends = mx.array([end - 1 for end in accumulate(counts)], dtype=mx.int32)
        return self._model.decode(known, packed_rows(caches, counts, positions), positions, ends)

    def _after(self, own: RowContext, tokens: Sequence[int]) -> mx.array:
        """Append a piece of a prompt; logits (vocab,) after it."""
        last = self._model.info.vocab_size - 1
        prompt = Prompt([min(token, last) for token in tokens])
        return self._model.prefill(PrefillChunk(prompt, 0, len(tokens), own.cache))

    def _alike(self) -> str:
        """Whether rows in one pass are what each of them is alone; else why not."""
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

    def _read_some(self, count: int) -> list[Any]:
        own = RowContext(self._model.make_cache())
        mx.eval(self._after(own, range(count)))
        return own.cache
