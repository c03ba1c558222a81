"""Estimates the memory of a model by its `config.json` alone, before a download or a load. Checks
its sizes, too: upstream makes layers in a loop, so a wrong number could block the engine for hours.

MLX computes only what is read. So upstream's class of a model is made without weights and called
with one token. The shapes of the caches that it fills give the memory of a row."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..engine.row_cache import profile
from ..engine.scheduling.ledger import STEP_TOKENS
from ..errors import BadRequest, UnsupportedModel
from ..families.caches import row_cache, text_cache
from ..families.checkpoint import text_fields
from ..isolation import plugin_call
from ..upstream import mlx_lm, mlx_vlm

MOST_LAYERS = 10_000
"""The largest known model has 126."""
LAYERS = frozenset(
    "num_hidden_layers num_layers n_layers n_layer depth encoder_layers decoder_layers"
    " num_encoder_layers num_decoder_layers mtp_num_hidden_layers num_nextn_predict_layers"
    " num_mtp_modules num_hidden_groups".split()
)
"""Keys that count layers. Each layer has at least one tensor."""
LISTS = frozenset({"layer_types", "layers_block_type", "hybrid_override_pattern", "depths"})
WIDTHS = frozenset(
    "hidden_size hidden_dim dim d_model n_embd embed_dim vocab_size intermediate_size"
    " moe_intermediate_size shared_expert_intermediate_size num_attention_heads num_heads n_heads"
    " n_head num_key_value_heads num_experts num_local_experts n_routed_experts head_dim rank"
    " r".split()
)
"""Sizes that are, or divide, a side of a matrix."""


def check_sizes(
    config: Mapping[str, Any], tensors: int | None = None, values: int | None = None
) -> None:
    """Raise `UnsupportedModel` that names the key of a size that is impossible with the weights.
    `tensors`, `values`: the most that the weight files can have of them; `None`: unknown."""
    layers = MOST_LAYERS if tensors is None else min(MOST_LAYERS, tensors)
    for key, value in _walk(config):
        if key in LAYERS and isinstance(value, int) and value > layers:
            raise _too_large(key, value, layers, "layers")
        if key in LISTS and isinstance(value, list | str) and len(value) > layers:
            raise _too_large(key, len(value), layers, "layers")
        if key in WIDTHS and values is not None and isinstance(value, int) and value > values:
            raise _too_large(key, value, values, "values")


def _too_large(key: str, size: int, most: int, what: str) -> UnsupportedModel:
    size_text = f"{size:,}" if size <= 10**18 else "more than 10^18"
    problem = f"config.json: {key} is {size_text}, where at most {most:,} {what} are possible"
    return UnsupportedModel(problem, param="model")


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    todo: list[Any] = [config]
    while todo:
        part = todo.pop()
        fields = part if isinstance(part, Mapping) else {}
        yield from fields.items()
        todo += part if isinstance(part, list) else fields.values()


@dataclass(frozen=True)
class Footprint:
    weights: int  # bytes
    kv_per_token: int  # bytes of the layers that keep every token
    per_row: int  # bytes of a row of any length: full windows and recurrent states


def footprint(config: Mapping[str, Any], weight_bytes: int) -> Footprint:
    """The memory of a model, with KV in the config's dtype. Raises `BadRequest` if upstream has no
    class that the config fits, or `UnsupportedModel` for impossible sizes."""
    check_sizes(config)
    named = text_fields(config).get("dtype") or text_fields(config).get("torch_dtype")
    kind = {"float32": mx.float32, "float16": mx.float16}.get(str(named), mx.bfloat16)
    problem = "config.json does not describe a whole model: "
    row = plugin_call(
        lambda: profile(_filled_cache(dict(config), kind)),
        lambda fault: BadRequest(problem + fault.summary, param="model"),
    )
    windows = sum(window * nbytes for window, nbytes in row.windows)
    return Footprint(weight_bytes, row.token_bytes, row.state_bytes + windows)


def _filled_cache(config: dict[str, Any], dtype: mx.Dtype) -> list[Any]:
    """The cache of a row with one token, not evaluated."""
    token = mx.array([[1]])
    if mlx_lm.supports(config):
        model_class, arguments = mlx_lm.classes(config)
        model = model_class(arguments.from_dict(config))
        model.set_dtype(dtype)
        model(token, cache=(cache := text_cache(model)))
        return cache
    model = mlx_vlm.without_weights(config)
    model.set_dtype(dtype)
    mlx_vlm.language_logits(model, token, cache := row_cache(model.language_model), {})
    return cache


def context_that_fits(footprint: Footprint, memory: int, limit: int | None) -> int:
    """The most tokens of one request, including its answer. 0: none fits; `sys.maxsize`: any.
    `memory`: bytes for the weights and the request together. `limit`: the model's own context. A
    smaller result is a multiple of 256, the unit of row memory."""
    longest = sys.maxsize if limit is None else limit
    left = memory - footprint.weights - footprint.per_row
    if left < 0:
        return 0
    if footprint.kv_per_token == 0:
        return longest
    return min(longest, left // footprint.kv_per_token // STEP_TOKENS * STEP_TOKENS)
