"""What a reproducible model's engine takes from the prefix cache: what a prefill would compute.

Kernels round by the width of a pass, so a prefix counts only as far as whole passes have computed
it, counted from the prompt's beginning. What a prompt's last pass computed is not kept, and nothing
of a reply, whose tokens came one by one.
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
    """The policy of an engine whose passes are fixed."""

    def __init__(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        kv: str,
        make_cache: Callable[[], list[Any]],
        shapes: FixedShapes,
    ) -> None:
        """`kv`: another one for all that may compute other bits."""
        super().__init__(cache, model, f"{kv}, whole passes of {shapes.tokens}", make_cache)
        self._shapes = shapes
        self._grid = shapes.tokens
        self._exact = True

    def keep_prefill(self, job: PrefillJob) -> None:
        """Store what whole passes have computed."""
        whole = self._shapes.whole(job.done)
        if job.cache is not None and whole:
            beyond = job.done > whole
            self._insert(job.request, job.ids[:whole], job.cache, job.snapshots, beyond=beyond)

    def keep_row(self, row: Row, tokens: Sequence[int], cache: list[Any]) -> None:
        """Nothing: its prompt was stored when it joined."""

    def _match(self, key: CacheKey, ids: Ids) -> Match:
        found = usable = super()._match(key, ids)
        while at := usable.length % self._shapes.tokens:
            usable = self._cache.match(key, ids, limit=usable.length - at)
        # the longest one tells where the prompt leaves the stored path
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
        """At ends of passes: none ends for the sake of a snapshot."""
        if self._strictest is Kind.APPEND:
            return
        prompt, grid = job.request.prompt, self._shapes.tokens
        every = self._places(job, start, branch, grid)
        wanted = {self._shapes.whole(at) for at in every}
        wanted.add(self._last(prompt))
        job.keeps = sorted(at for at in wanted if at > start and outside_spans(job.ids, at) == at)

    def _ends(self, prompt: Prompt) -> set[int]:
        return {self._shapes.whole(at) for at in ends_of(prompt)} | {self._last(prompt)}

    def _last(self, prompt: Prompt) -> int:
        """Where the next turn of a conversation, or the same prompt, resumes."""
        return self._shapes.whole(len(prompt.tokens) - 1)
