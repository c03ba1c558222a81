"""What one model's engine takes from the prefix store, and what it leaves there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..records import LoadedModel, Prompt
from .prefix_key import Ids, as_ids
from .prefix_store import Match, PrefixStore, StoreKey, key_tokens
from .request import Prefill, Request, Row

log = logging.getLogger(__name__)

WORTH_WAITING = 256
"""Tokens that another prompt must be about to provide before this one waits for it."""
WORTH_KEEPING = 32
"""Fewer tokens of a cancelled prefill are not stored."""
WORTH_A_PASS = 32
"""Tokens that a checkpoint must spare beyond the one before it, to be worth a pass of its own."""
AROUND = 8
"""Tokens shown on either side of the place where a prompt left the stored path."""


class Reuse:
    """Every method belongs to the engine thread."""

    def __init__(
        self,
        store: PrefixStore,
        model: LoadedModel,
        kv: str,
        make_cache: Callable[[], list[Any]],
    ) -> None:
        self._store = store
        self._model = model
        self._kv = kv
        self._make_cache = make_cache
        self._stateful = True
        """Whether some layer's state cannot be cut later, as far as is known."""

    def cuts(self, prompt: Prompt) -> tuple[int, ...]:
        """Where the prefill of a prompt must pause for a checkpoint; none without such state."""
        return cuts_of(prompt) if self._stateful else ()

    def estimate(self, work: Prefill) -> None:
        """Tell the scheduler how much of a prompt the store would provide now."""
        work.expected = self._match(work).length

    def begin(self, work: Prefill) -> None:
        """Give the work a cache with the longest stored prefix in it."""
        match = self._match(work)
        work.cache = self._store.restore(
            match, self._make_cache, room=len(work.tokens) - match.length
        )
        work.done = match.length
        if len(work.tokens) == len(work.request.prompt.tokens):
            work.request.cached = match.length
            work.request.explanation = self._explained(work, match)

    def provides(self, leader: Prefill, work: Prefill) -> bool:
        """Whether `leader`, in prefill now, will soon provide much of `work`'s prompt."""
        if leader is work or not leader.started or leader.request.salt != work.request.salt:
            return False
        shared = common(self._ids(leader), self._ids(work))
        return min(shared, len(work.tokens) - 1) - work.expected > WORTH_WAITING

    def at_cut(self, work: Prefill) -> None:
        """Snapshot the state at a planned place, if there is state that cannot be cut later."""
        if work.done in work.cuts and work.cache is not None:
            checkpoint = self._store.checkpoint(work.cache)
            if checkpoint is not None:
                work.checkpoints[work.done] = checkpoint
            self._stateful = checkpoint is not None

    def keep_prefill(self, work: Prefill) -> None:
        """Store what a prefill, whole or cancelled, has computed."""
        if work.cache is not None and work.done >= WORTH_KEEPING:
            ids = self._ids(work)[: work.done]
            self._insert(work.request, ids, work.cache, work.checkpoints)

    def keep_row(self, row: Row, tokens: Sequence[int], cache: list[Any]) -> None:
        """Store a row that ends; its cache holds the prompt and these tokens of the reply."""
        prompt = as_ids(key_tokens(row.request.prompt))
        ids = np.concatenate([prompt, as_ids(tokens)])
        self._insert(row.request, ids, cache, {})

    def _insert(
        self, request: Request, ids: Ids, cache: list[Any], checkpoints: dict[int, Any]
    ) -> None:
        self._store.insert(self._key(request), ids, cache, checkpoints, session=request.session)

    def _match(self, work: Prefill) -> Match:
        ids = self._ids(work)
        return self._store.match(self._key(work.request), ids, limit=len(ids) - 1)

    def _key(self, request: Request) -> StoreKey:
        return StoreKey(self._model.info.fingerprint, self._kv, request.salt)

    def _ids(self, work: Prefill) -> Ids:
        if work.ids is None:
            prompt = work.request.prompt
            after = work.tokens[len(prompt.tokens) :]
            work.ids = as_ids([*key_tokens(prompt), *after])
        ids: Ids = work.ids
        return ids

    def _explained(self, work: Prefill, match: Match) -> str:
        """Why a prompt was not found whole, in a line."""
        at = match.diverged_at
        if at is None or match.stored_token is None:
            return ""
        here = self._text(work.tokens[max(0, at - AROUND) : at + AROUND])
        stored = self._text([match.stored_token])
        return (
            f"left the stored prefix at token {at} of {match.asked}: ...{here!r}, there {stored!r}"
        )

    def _text(self, tokens: Sequence[int]) -> str:
        real = [t for t in tokens if t >= 0]
        return self._model.tokenizer.decode(real, skip_special=False) if real else "<media>"


def cuts_of(prompt: Prompt) -> tuple[int, ...]:
    """Where state is worth keeping: message ends, and image ends for another question.

    Image ends always are, and the last message's, for the next turn; other messages' only if
    they spare more than a pass costs.
    """
    kept = {*(span.end for span in prompt.spans), *prompt.checkpoints[-1:]}
    cuts: list[int] = []
    for end in sorted(kept | {*prompt.checkpoints}):
        far = end - max(cuts, default=0) >= WORTH_A_PASS
        if 0 < end < len(prompt.tokens) and (far or end in kept):
            cuts.append(end)
    return tuple(cuts)


def common(a: Ids, b: Ids) -> int:
    """Length of the common beginning of two id arrays."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
