"""What one model's engine takes from the prefix store, and what it leaves there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...records import LoadedModel, Prompt
from ..request import Prefill, Request, Row
from .key import Ids, as_ids
from .segments import Kind
from .store import Match, PrefixStore, StoreKey, key_tokens

log = logging.getLogger(__name__)

WORTH_WAITING = 256
"""Tokens that another prompt must be about to provide before this one waits for it."""
WORTH_KEEPING = 32
"""Fewer tokens of a cancelled prefill are not stored."""
WORTH_A_PASS = 64
"""Tokens that a checkpoint must spare beyond the state before it, to be worth a pass of its own:
reading the weights once more costs as much time as some tens to hundreds of tokens."""
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
        self._strictest = store.strictest(make_cache())

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
            self._plan(work)
            work.request.cached = match.length
            work.request.explanation = self._explained(work, match)

    def provides(self, leader: Prefill, work: Prefill) -> bool:
        """Whether `leader`, in prefill now, will soon provide much of `work`'s prompt."""
        if leader is work or not leader.started or leader.request.salt != work.request.salt:
            return False
        shared = common(self._ids(leader), self._ids(work))
        return min(shared, len(work.tokens) - 1) - work.expected > WORTH_WAITING

    def _plan(self, work: Prefill) -> None:
        """Where checkpoints are taken; a pass must end there where a layer keeps a state."""
        if self._strictest is not Kind.APPEND:
            work.keeps = cuts_of(work.request.prompt, work.done)
        if self._strictest is Kind.STATE:
            work.cuts = work.keeps

    def passed(self, work: Prefill, start: int) -> None:
        """Take the planned checkpoints of a pass that has just brought `work` on from `start`."""
        for at in work.keeps:
            if start < at <= work.done:
                exact = at == work.done
                checkpoint = self._store.checkpoint(work.held(), None if exact else at)
                if checkpoint is not None:
                    work.checkpoints[at] = checkpoint

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


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Where state is worth keeping: message ends, and image ends for another question.

    Image ends always are; message ends only if they spare more than a pass costs, counted from
    the last state there is. `done`: tokens with which the row resumes.
    """
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted(images | {*prompt.checkpoints}):
        far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (far or end in images):
            cuts.append(end)
    return tuple(cuts)


def common(a: Ids, b: Ids) -> int:
    """Length of the common beginning of two id arrays."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
