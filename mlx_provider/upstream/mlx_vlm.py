"""mlx-vlm's models called as its own `generate_step` does. Holds for mlx-vlm 0.7.10 (< 0.8).

Its M-RoPE models remember the last request's positions on the model object; here none are read
from it and none are left (mlx_vlm/models: `LanguageModel._rope_deltas`, `_position_ids`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModel
from .file_limit import file_limit_kept

REQUEST_STATE = ("_rope_deltas", "_position_ids")
"""What mlx-vlm's M-RoPE models remember of the last request."""


def library() -> Any:
    """`mlx_vlm.utils`; its models import mlx-lm."""
    with file_limit_kept():
        importlib.import_module("mlx_lm.utils")
        return importlib.import_module("mlx_vlm.utils")


def has_mrope(model: Any) -> bool:
    """Whether it has M-RoPE: positions in time, height and width."""
    return hasattr(model.language_model, "_rope_deltas")


def embedded(model: Any, inputs: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """What `Model.get_input_embeddings` makes of a processor's arrays; evaluates nothing."""
    arrays = dict(inputs)
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values", None)
    mask = arrays.pop("attention_mask", None)
    _forget(model.language_model)
    made = model.get_input_embeddings(ids, pixels, mask=mask, **arrays)
    _forget(model.language_model)
    return {key: value for key, value in made.to_dict().items() if value is not None}


def language_logits(model: Any, ids: mx.array, cache: list[Any], more: dict[str, Any]) -> mx.array:
    """The language model on `ids` (B, length); logits (B, length, vocab).

    `more`: further arguments, of which it gets those that it takes. Raises `UnsupportedModel` for
    a model that attends across to an encoder.
    """
    language = model.language_model
    _forget(language)
    try:
        made = language(ids, cache=cache, **accepted(language, more))
    finally:
        _forget(language)
    if getattr(made, "cross_attention_states", None) is not None:
        raise UnsupportedModel("models that attend across to an encoder are not served")
    logits: mx.array = made.logits if hasattr(made, "logits") else made
    return logits


def accepted(language: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the callee takes, plus `None` for what it demands beyond them.

    Some models declare `pixel_values` or `mask` without a default.
    """
    parameters = list(inspect.signature(type(language).__call__).parameters.values())[2:]
    wild = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    taken = {k: v for k, v in arguments.items() if wild or k in named}
    demanded = {
        p.name: None
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    demanded.pop("cache", None)
    return demanded | taken


def _forget(language: Any) -> None:
    for name in REQUEST_STATE:
        if hasattr(language, name):
            setattr(language, name, None)
