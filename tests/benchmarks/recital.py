"""A model that thinks as it likes, then writes a call that a benchmark tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_provider.chat.constraints.readable import written_calls
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Request
from mlx_provider.families.vision.patch_model import PatchVisionModel
from mlx_provider.records import LoadedModel, PrefillChunk, ToolParser
from recorded_agents import Call
from replaced import Patch, wrap

PARSER = ToolParser("hermes", "<tool_call>", "</tool_call>")
PULL = 100.0
"""Added to the logit of a token that is recited."""
THOUGHT = 48
"""Tokens of a thought."""


class Recital:
    """Lets a model think as it likes, then write a text."""

    def __init__(self, patch: Patch, model: LoadedModel) -> None:
        self._model = model
        self._said = mx.array([-1])
        """The token at each position; -1: the model's own."""
        self.call: Call | None = None
        """Of the next reply."""
        tokenizer = model.tokenizer
        self._special = min(tokenizer.encode("<|im_start|></think>", special=False))
        wrap(patch, Engine, "submit", self._submitted)
        wrap(patch, PatchVisionModel, "prefill_hidden", self._prefilled)
        wrap(patch, PatchVisionModel, "decode_hidden", self._decoded)

    def _submitted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit(engine: Engine, request: Request) -> Any:
            if self.call is not None:
                self._said = self._reply(len(request.prompt.tokens), self.call)
            return original(engine, request)

        return submit

    def _reply(self, prompt: int, call: Call) -> mx.array:
        """A thought and a call, behind so many tokens."""
        written = written_calls(PARSER.call_grammar(), [(call.name, call.arguments, {})])
        text = f"\n</think>\n{written}<|im_end|>"
        tokens = self._model.tokenizer.encode(text, special=False)
        return mx.array([-1] * (prompt + THOUGHT) + tokens)

    def _prefilled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prefill(model: Any, chunk: PrefillChunk, last: int) -> Any:
            logits, hidden = original(model, chunk, last)
            return self._pulled(model, logits, mx.array(chunk.stop)), hidden

        return prefill

    def _decoded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(
            model: Any, tokens: Any, cache: Any, places: mx.array, at: mx.array | None = None
        ) -> Any:
            logits, hidden = original(model, tokens, cache, places, at)
            return self._pulled(model, logits, 1 + (places if at is None else places[at])), hidden

        return decode

    def _pulled(self, model: Any, logits: mx.array, positions: mx.array) -> mx.array:
        if model is not self._model:
            return logits
        said = self._said[mx.minimum(positions, self._said.size - 1)][..., None]
        tokens = mx.arange(logits.shape[-1])
        own = mx.where(tokens < self._special, 0.0, -PULL)  # a thought of plain words
        return logits + mx.where(said < 0, own, PULL * (tokens == said))
