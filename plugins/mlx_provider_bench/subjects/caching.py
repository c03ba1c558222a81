"""Our engine with its prefix cache in this process, and the cost that remains after a hit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_provider.commands import EngineSettings
from mlx_provider.engine.execution.probe import Probe
from mlx_provider.engine.feature_cache import FeatureCache
from mlx_provider.engine.memory import arrays
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids, key_tokens
from mlx_provider.records import LoadedModel, MediaItem, PrefillChunk, Prompt
from mlx_provider.testing.driver import new_request

from .batching import WIDE, Job, TimedOutput, server_engine

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Timed:
    """`first`: seconds until its first token."""

    first: float
    tokens: list[int]
    prompt_tokens: int
    cached: int


class InProcess:
    def __init__(self, model: LoadedModel, probe: Probe, *, reuse: bool) -> None:
        self.model = model
        self._store = PrefixCache(budget=lambda: WIDE)
        features = EngineSettings().feature_bytes if reuse else 0
        self._engine = server_engine(
            model,
            probe,
            prefix_cache=self._store if reuse else None,
            features=FeatureCache(features),
        )

    def prompt(self, messages: Messages, media: Sequence[MediaItem]) -> Prompt:
        return self.model.prepare(messages, tools=[], media=media, variables={})

    def ask(self, prompt: Prompt, max_tokens: int) -> Timed:
        """Greedy; time starts when the engine has the tokens."""
        import mlx.core as mx

        job = Job(list(prompt.tokens), max_tokens)
        request = new_request(prompt.tokens, max_tokens=max_tokens)
        request.prompt = prompt
        request.rows[0].output = TimedOutput(job)
        mx.synchronize()
        began = time.perf_counter()
        self._engine.submit(request)
        while not self._engine.idle:
            self._engine.step()
        return Timed(job.times[0] - began, job.tokens, len(prompt.tokens), request.cached)

    def suffix_alone(self, prompt: Prompt) -> tuple[float, float]:
        """Seconds of model time for the uncached tokens of a prompt: in one call, and with the last
        token in a call of its own."""
        return self._prefill_seconds(prompt, False), self._prefill_seconds(prompt, True)

    def _prefill_seconds(self, prompt: Prompt, apart: bool) -> float:
        import mlx.core as mx

        end = len(prompt.tokens)
        key = CacheKey(self.model.info.fingerprint, "")
        match = self._store.match(key, as_ids(key_tokens(prompt)), limit=end - 1)
        cache = self._store.acquire(match, self.model.make_cache, room=end - match.length)[0]
        features = {
            span.content_hash: self.model.embed(span)
            for span in prompt.spans
            if span.end > match.length
        }
        chunk = partial(PrefillChunk, prompt, cache=cache, features=features)
        mx.eval(arrays(cache))
        began = time.perf_counter()
        start = match.length
        if apart and end - start > 1:
            self.model.prefill(chunk(start=start, stop=end - 1))
            mx.eval(arrays(cache))
            start = end - 1
        mx.eval(mx.argmax(self.model.prefill(chunk(start=start, stop=end))))
        return time.perf_counter() - began
