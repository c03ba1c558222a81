"""A text model over mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import (
    BadRequest,
    Features,
    LoadOptions,
    MediaItem,
    MediaSpan,
    ModelInfo,
    PrefillChunk,
    Prompt,
)
from mlx_provider.upstream import attention, cpu_functions, mlx_lm
from mlx_provider.upstream.checkpoint import describe
from mlx_provider.upstream.hf_tokenizer import HFTokenizer


@dataclass(frozen=True)
class TextModel:
    """See `mlx_provider.LoadedModel`; positions are those of plain text."""

    model: Any
    tokenizer: HFTokenizer
    info: ModelInfo
    kv_layouts: Sequence[str]

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        if media:
            raise BadRequest("this model takes text only: remove the image", param="messages")
        rendered = self.tokenizer.render(messages, tools, variables)
        return Prompt(tokens=rendered.tokens, text=rendered.text, checkpoints=rendered.checkpoints)

    def embed(self, span: MediaSpan) -> Features:
        raise BadRequest("this model takes text only", param="messages")

    def make_cache(self) -> list[Any]:
        return mlx_lm.make_cache(self.model)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        tokens = mx.array(list(chunk.prompt.tokens[chunk.start : chunk.stop]))
        logits: mx.array = self.model(tokens[None], cache=chunk.cache)
        return logits[0, -1]

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        logits: mx.array = self.model(tokens[:, None], cache=cache)
        return logits[:, -1]


def load_text(path: Path, options: LoadOptions) -> TextModel:
    """Load weights and tokenizer; batch layouts are those that attention can be routed for."""
    loaded = mlx_lm.load(path, adapter=options.adapter, trust_remote_code=options.trust_remote_code)
    if options.dtype is not None:
        loaded.model.set_dtype(getattr(mx, options.dtype))
    mx.eval(loaded.model.parameters())
    tokenizer = HFTokenizer(loaded.tokenizer, loaded.renderer)
    attention.route(loaded.model)
    cpu_functions.adopt(loaded.model)
    info = describe(
        path, loaded.config, loaded.model, tokenizer, options, stop_tokens=loaded.stop_tokens
    )
    return TextModel(
        model=loaded.model,
        tokenizer=tokenizer.within(info.context_length),
        info=info,
        kv_layouts=("grouped", "merged", "solo"),
    )
