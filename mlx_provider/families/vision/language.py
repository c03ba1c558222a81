"""Converts hidden states of mlx-vlm's text model to logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def head(language_model: Any, hidden: mx.array) -> mx.array:
    if "lm_head" in language_model:
        logits: mx.array = language_model.lm_head(hidden)
        return logits
    tied: mx.array = language_model.model.embed_tokens.as_linear(hidden)
    return tied


def vocab_size(language_model: Any) -> int:
    if "lm_head" in language_model:
        return int(language_model.lm_head.weight.shape[0])
    return int(language_model.model.embed_tokens.weight.shape[0])
