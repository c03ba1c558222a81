"""Compares sizes in a `config.json` with the weights before any class is built from them: a class
makes its layers in a Python loop, so an unchecked number could block the engine for hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UnsupportedModel

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
    for key, value in _named(config):
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


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    todo: list[Mapping[str, Any]] = [config]
    while todo:
        for key, value in todo.pop().items():
            yield key, value
            if isinstance(value, Mapping):
                todo.append(value)
