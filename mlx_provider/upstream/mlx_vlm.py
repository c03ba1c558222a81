"""Calls mlx-vlm's models as its `generate_step` does (0.7.10, < 0.8).

Its M-RoPE models store the positions of the last request on the model object. The calls here
neither read nor leave such state (mlx_vlm/models: `LanguageModel._rope_deltas`, `_position_ids`).
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModel
from .runtime import keep_file_limit

REQUEST_STATE = ("_rope_deltas", "_position_ids")


def library() -> Any:
    """The module `mlx_vlm.utils`, imported without a change of the limit of open files."""
    with keep_file_limit():
        importlib.import_module("mlx_lm.utils")
        return importlib.import_module("mlx_vlm.utils")


def without_weights(config: Mapping[str, Any]) -> Any:
    """The model of a `config.json`, made as `load_model` makes it (`utils.py`)."""
    parts = ("text", "vision", "perceiver", "projector", "audio")
    given = {"vision_config": {}, "audio_config": {}, **config}
    given.setdefault("text_config", given.pop("llm_config", {}))
    module, _ = library().get_model_and_args(given)
    model_config = module.ModelConfig.from_dict(given)
    return module.Model(library().update_module_configs(model_config, module, given, parts))


def has_mrope(model: Any) -> bool:
    """Whether its rotary positions have three axes."""
    return hasattr(model.language_model, "_rope_deltas")


def embed(model: Any, inputs: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The result of `get_input_embeddings` for a processor's arrays, not evaluated."""
    arrays = dict(inputs)
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values", None)
    mask = arrays.pop("attention_mask", None)
    _forget(model.language_model)
    try:
        embeddings = model.get_input_embeddings(ids, pixels, mask=mask, **arrays)
    finally:
        _forget(model.language_model)
    return {key: value for key, value in embeddings.to_dict().items() if value is not None}


def language_logits(model: Any, ids: mx.array, cache: list[Any], more: dict[str, Any]) -> mx.array:
    """Logits (B, length, vocab) of the language model for `ids` (B, length). `more`: further
    arguments, if the model accepts them. Raises `UnsupportedModel` for a model with cross-attention
    to an encoder."""
    language = model.language_model
    _forget(language)
    try:
        output = language(ids, cache=cache, **select_arguments(language, more))
    finally:
        _forget(language)
    if getattr(output, "cross_attention_states", None) is not None:
        raise UnsupportedModel("models with cross-attention to an encoder are not supported")
    logits: mx.array = output.logits if hasattr(output, "logits") else output
    return logits


def select_arguments(language: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call of `language` accepts, plus `None` for each required one that is
    missing: some models declare `pixel_values` or `mask` without a default."""
    signature = inspect.signature(type(language).__call__)
    parameters = list(signature.parameters.values())[2:]  # without self and ids
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    accepted = {k: v for k, v in arguments.items() if accepts_any or k in named}
    required = {
        p.name: None
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required.pop("cache", None)
    return required | accepted


def _forget(language: Any) -> None:
    for name in REQUEST_STATE:
        if hasattr(language, name):
            setattr(language, name, None)
