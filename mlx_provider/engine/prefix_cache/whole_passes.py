"""The prefix cache policy of a reproducible model: stores only what a prefill would compute.

Kernels round by the width of a pass, so only prefixes of whole passes count. The last pass of a
prompt is not stored, and neither is a reply, whose tokens ran one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...records import LoadedModel, Prompt
from ..fixed_shapes import FixedShapes
from ..request import PrefillJob, Row
from .cache import CacheKey, Match, PrefixCache
from .key import Ids, outside_spans
from .layer_kinds import Kind
from .placement import ends_of
from .policy import PrefixCachePolicy


class WholePasses(PrefixCachePolicy):
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
        self._exact = True

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
        return replace(
            usable,
            shared=found.shared,
            branch=found.branch,
            diverged_at=found.diverged_at,
            stored_token=found.stored_token,
        )

    def _whole(self, done: int) -> int:
        return self._shapes.whole(done)

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
