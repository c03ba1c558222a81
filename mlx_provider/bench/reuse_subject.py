"""Our engine with its prefix store, stepped in this process, and what a hit cannot spare."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import EngineSettings
from ..engine.engine import Engine
from ..engine.execution.probe import Probe
from ..engine.feature_cache import FeatureCache
from ..engine.memory import arrays
from ..engine.prefix_cache.key import StoreKey, as_ids, key_tokens
from ..engine.prefix_cache.policy import PrefixReuse
from ..engine.prefix_cache.store import PrefixStore
from ..engine.scheduling.scheduler import Budget, Limits, Scheduler
from ..records import LoadedModel, MediaItem, PrefillChunk, Prompt
from ..testing.driver import SilentRecorder, new_request
from .subjects import WIDE, Job, TimedOutput

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Timed:
    """One reply. `first`: seconds until its first token."""

    first: float
    tokens: list[int]
    prompt_tokens: int
    cached: int


class InProcess:
    """An engine over a loaded and probed model."""

    def __init__(self, model: LoadedModel, probe: Probe, *, reuse: bool) -> None:
        s = EngineSettings()
        self.model = model
        self._store = PrefixStore(budget=lambda: WIDE)
        limits = Limits(s.max_rows, s.max_queue, s.stall_target, s.max_chunk, s.output_reserve)
        self._engine = Engine(
            model,
            Scheduler(
                limits, Budget(lambda tokens: tokens, lambda: WIDE, lambda need: None, lambda: WIDE)
            ),
            layout=probe.layout,
            mixes=probe.mixes,
            make_cache=model.make_cache,
            recorder=SilentRecorder(),
            prefix_cache=PrefixReuse(self._store, model, "", model.make_cache) if reuse else None,
            features=FeatureCache(s.feature_bytes if reuse else 0),
        )

    def prompt(self, messages: Messages, media: Sequence[MediaItem]) -> Prompt:
        """Messages in the form that templates take, as the chat layer would hand them on."""
        return self.model.prepare(messages, tools=[], media=media, variables={})

    def ask(self, prompt: Prompt, max_tokens: int) -> Timed:
        """Greedy reply; time starts when the engine has the tokens."""
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
        """Seconds of model time for what the store lacks of a prompt, the cache being there.

        Two ways: in one call, and with the last token in a call of its own.
        """
        return self._prefill_seconds(prompt, False), self._prefill_seconds(prompt, True)

    def _prefill_seconds(self, prompt: Prompt, apart: bool) -> float:
        import mlx.core as mx

        end = len(prompt.tokens)
        key = StoreKey(self.model.info.fingerprint, "")
        match = self._store.match(key, as_ids(key_tokens(prompt)), limit=end - 1)
        cache = self._store.restore(match, self.model.make_cache, room=end - match.length)
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
