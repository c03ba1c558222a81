"""The memory of a model by its `config.json` alone, before a download or a load, and a check of its
sizes: a class makes its layers in a Python loop, so an unchecked number could block the engine for
hours.

It names no family: it reads the field names that configs share, and takes missing fields from
transformers' configuration class of the same `model_type`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BadRequest, UnsupportedModel
from ..isolation import Isolation

MOST_LAYERS = 10_000
"""The largest known model has 126."""
LAYERS = frozenset(
    {
        *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers"),
        *("decoder_layers", "num_encoder_layers", "num_decoder_layers", "mtp_num_hidden_layers"),
        *("num_nextn_predict_layers", "num_mtp_modules", "num_hidden_groups"),
    }
)
"""Each layer has at least one tensor."""
LISTS = frozenset({"layer_types", "layers_block_type", "hybrid_override_pattern", "depths"})
WIDTHS = frozenset(
    {
        *("hidden_size", "hidden_dim", "dim", "d_model", "n_embd", "embed_dim", "vocab_size"),
        *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        *("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "head_dim", "rank", "r"),
    }
)
"""Sizes that are, or divide, a side of a matrix."""


def check_sizes(
    config: Mapping[str, Any], tensors: int | None = None, values: int | None = None
) -> None:
    """Raise `UnsupportedModel` that names the key of a size that is impossible with the weights.
    `tensors`, `values`: upper limits of the content of the weight files; `None`: unknown."""
    layers = MOST_LAYERS if tensors is None else min(MOST_LAYERS, tensors)
    for key, value in _walk(config):
        if key in LAYERS and isinstance(value, int) and value > layers:
            raise _too_large(key, value, layers, "layers")
        if key in LISTS and isinstance(value, list | str) and len(value) > layers:
            raise _too_large(key, len(value), layers, "layers")
        if key in WIDTHS and values is not None and isinstance(value, int) and value > values:
            raise _too_large(key, value, values, "values")


def _too_large(key: str, size: int, most: int, what: str) -> UnsupportedModel:
    size_text = f"{size:,}" if size < 10**18 else "more than 10^18"
    return UnsupportedModel(
        f"config.json: {key} is {size_text}, where at most {most:,} {what} fit into its weights",
        param="model",
    )


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    todo: list[Mapping[str, Any]] = [config]
    while todo:
        for key, value in todo.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                todo.append(value)


STEP = 256
"""Capacity step of a row in tokens (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
STATE_BYTES = 4
"""Bytes per value of a recurrent state: float32 in mlx-lm and mlx-vlm."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_FULL = ("full_attention", "attention", "global", "hybrid", "*")
_WINDOW = ("sliding_attention", "chunked_attention", "local", "window")
_STATE = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "short_conv", "M")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Footprint:
    weights: int
    kv_per_token: int
    """Bytes of the layers that keep every token."""
    per_row: int
    """Bytes of full windows and recurrent states."""


def footprint(
    config: Mapping[str, Any], weight_bytes: int, *, dtype: str | None = None
) -> Footprint:
    """The footprint of a model with this `config.json` and with `weight_bytes` of weights.

    `dtype`: of the loaded weights, if not the config's own. Counts like the engine's
    `MemoryProfile`, except: multi-head latent attention counts only its latent, too little for
    older classes of mlx-lm that keep whole heads; a recurrent layer whose state no known field
    describes counts as attention, usually too much. Raises `BadRequest` if counts of layers or
    heads are missing or too large.
    """
    check_sizes(config)
    text = _complete(config)
    value = DTYPE_BYTES.get(dtype or named_dtype(config), 2)
    kinds = list(_kinds(text))
    full = sum(kind in ("full", "both") for kind in kinds)
    windowed = sum(_kv_values(text, full=False)) * value * _window(text)
    states = sum(kind in ("state", "both") for kind in kinds)
    return Footprint(
        weight_bytes,
        full * sum(_kv_values(text, full=True)) * value,
        kinds.count("window") * windowed + states * (_state_bytes(text, value) or 0),
    )


def context_that_fits(footprint: Footprint, memory: int, limit: int | None) -> int:
    """The most tokens of one request, including its answer. 0: none fits. `memory`: bytes for the
    weights and the request together. `limit`: the model's own context. Below it, the result is a
    multiple of 256, the unit of row memory."""
    longest = sys.maxsize if limit is None else limit
    left = memory - footprint.weights - footprint.per_row
    if left < 0:
        return 0
    if footprint.kv_per_token == 0:
        return longest
    return min(longest, left // footprint.kv_per_token // STEP * STEP)


def text_fields(config: Mapping[str, Any]) -> Fields:
    """The part of a config for the language model, with the outer fields."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return {**config, **inner}
    return config


def _complete(config: Mapping[str, Any]) -> Fields:
    text = text_fields(config)
    if _layers(text) and (_heads(text) or _state_bytes(text, 2) is not None):
        return {**text, **_windowed_layers(text)}
    text = {**text, **_derive(text)}
    for what, found in (("layers", _layers(text)), ("attention heads", _heads(text))):
        if not found:
            raise BadRequest(f"config.json does not say how many {what} there are", param="model")
    return text


def _windowed_layers(text: Fields) -> Fields:
    """If a config has a window but no list of layers, its configuration class decides. Without a
    rule there, every layer keeps all tokens."""
    if not _number(text, "sliding_window") or _named_kinds(text) or _period(text):
        return {}
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = _number(_derive(text), *names)
    return {names[0]: pattern} if pattern else {}


def _derive(text: Fields) -> Fields:
    """All fields that the configuration class of the `model_type` derives from a config; empty
    without one. The class raises many kinds of errors for unexpected configs."""
    from transformers import CONFIG_MAPPING

    kind = text.get("model_type")
    if kind in CONFIG_MAPPING:
        with Isolation():
            return text_fields(CONFIG_MAPPING[kind](**text).to_dict())
    return {}


def _number(fields: Fields, *names: str) -> int:
    """The first of several fields with a positive integer. 0: none."""
    for name in names:
        found = fields.get(name)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return 0


def named_dtype(config: Mapping[str, Any]) -> str:
    text = text_fields(config)
    named = (text.get("dtype"), text.get("torch_dtype"), config.get("torch_dtype"))
    return next((name for name in named if isinstance(name, str)), "")


def _layers(text: Fields) -> int:
    named = len(_named_kinds(text))
    return named or _number(text, "num_hidden_layers", "num_layers", "n_layers", "n_layer")


def _heads(text: Fields) -> int:
    return _number(text, "num_attention_heads", "num_heads", "n_heads", "n_head")


# -- which layer keeps what


def _kinds(text: Fields) -> Iterator[str]:
    """`full`, `window`, `state`, `both` (attention and a state) or nothing, per layer. Leaves out
    layers that read another layer's keys and values."""
    named = _named_kinds(text)
    own = _layers(text) - _number(text, "num_kv_shared_layers", "num_kv_reuse_layers")
    described = _state_bytes(text, 2) is not None
    for layer in range(max(0, own)):
        kind = named[layer] if layer < len(named) else _kind_by_rule(text, layer)
        yield "full" if kind == "state" and not described else kind


def _named_kinds(text: Fields) -> Sequence[str]:
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        listed = text.get(name)
        if isinstance(listed, (list, str)) and listed:
            # a list may include layers of experts and plain MLPs, which store nothing
            return [_kind(str(each)) for each in listed]
    return []


def _kind(name: str) -> str:
    """Unknown names (a layer of experts, a plain MLP) store nothing."""
    groups = (("full", _FULL), ("window", _WINDOW), ("state", _STATE))
    return next((kind for kind, names in groups if name in names), "")


def _kind_by_rule(text: Fields, layer: int) -> str:
    rest = "state" if _state_bytes(text, 2) is not None else "window"
    for name in ("full_attn_idxs", "attn_layer_indices", "full_attn_layers"):
        indices = text.get(name)
        if isinstance(indices, list):
            return "full" if layer in indices else rest
    if period := _number(text, "attn_layer_period"):
        return "full" if layer % period == text.get("attn_layer_offset", 0) else rest
    if period := _period(text):
        return "full" if layer % period == period - 1 else rest
    if rest == "state":
        attends = _heads(text) and not _number(text, "decay_low_rank_dim", "state_size")
        return "both" if attends else "state"
    return "full"


def _period(text: Fields) -> int:
    if _number(text, "attention_chunk_size"):
        return _number(text, "no_rope_layer_interval") or 4
    if _number(text, "sliding_window") and _number(text, "sliding_window_pattern"):
        return _number(text, "sliding_window_pattern")
    return _number(text, "full_attention_interval")


def _window(text: Fields) -> int:
    return _number(text, "sliding_window", "attention_window_size", "attention_chunk_size")


# -- how much a layer keeps


def _kv_values(text: Fields, *, full: bool) -> tuple[int, int]:
    """Values per token that an attention layer stores: keys, and values."""
    if rank := _number(text, "kv_lora_rank"):
        return rank, _number(text, "qk_rope_head_dim")
    heads = _number(text, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or _heads(text)
    size = _number(text, "head_dim") or _hidden(text) // max(1, _heads(text))
    if full:
        size = _number(text, "global_head_dim") or size
        if text.get("attention_k_eq_v"):
            heads = _number(text, "num_global_key_value_heads") or heads
    return heads * size, heads * (_number(text, "v_head_dim") or size)


def _hidden(text: Fields) -> int:
    return _number(text, "hidden_size", "hidden_dim", "n_embd", "d_model")


def _state_bytes(text: Fields, value: int) -> int | None:
    """`None`: no field describes the layer. Shapes as in the caches of mlx-lm 0.32.2: a gated delta
    rule or a state space with a convolution before it, or only a convolution."""
    for of in (_delta_rule, _keyed_delta_rule, _state_space, _selective, _decay, _convolution):
        if (found := of(text, value)) is not None:
            return found
    return None


def _delta_rule(text: Fields, value: int) -> int | None:
    heads = _number(text, "linear_num_value_heads")
    if not heads:
        return None
    width = _number(text, "linear_value_head_dim")
    key = _number(text, "linear_key_head_dim")
    mixed = 2 * _number(text, "linear_num_key_heads") * key + heads * width
    kept = _number(text, "linear_conv_kernel_dim") - 1
    return heads * width * key * STATE_BYTES + kept * mixed * value


def _keyed_delta_rule(text: Fields, value: int) -> int | None:
    own = text.get("linear_attn_config")
    if not isinstance(own, Mapping):
        return None
    heads, size = _number(own, "num_heads"), _number(own, "head_dim")
    kept = _number(own, "short_conv_kernel_size") - 1
    return heads * size * size * STATE_BYTES + 3 * kept * heads * size * value


def _state_space(text: Fields, value: int) -> int | None:
    heads = _number(text, "mamba_num_heads", "mamba_n_heads")
    if not heads:
        return None
    inner = heads * _number(text, "mamba_head_dim", "mamba_d_head")
    state = _number(text, "ssm_state_size", "mamba_d_state")
    groups = _number(text, "n_groups", "mamba_n_groups")
    kept = _number(text, "conv_kernel", "mamba_d_conv") - 1
    return inner * state * STATE_BYTES + kept * (inner + 2 * groups * state) * value


def _selective(text: Fields, value: int) -> int | None:
    state = _number(text, "mamba_d_state")
    if not state:
        return None
    inner = _number(text, "mamba_expand") * _hidden(text)
    return inner * state * value + (_number(text, "mamba_d_conv") - 1) * inner * value


def _decay(text: Fields, value: int) -> int | None:
    if not _number(text, "decay_low_rank_dim"):
        return None
    return _hidden(text) * (_number(text, "head_dim") + 2) * value


def _convolution(text: Fields, value: int) -> int | None:
    kept = _number(text, "conv_L_cache") - 1
    return kept * _hidden(text) * value if kept >= 0 else None
