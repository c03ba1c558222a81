"""The `ModelInfo` of a loaded model, from its folder, its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from ..records import LoadOptions, ModelInfo
from .checkpoint import context_length, fingerprint, read_json, sampling_defaults
from .embedding import embedding_of
from .tokenizer import HFTokenizer
from .tokenizer.dialect import dialect


def describe(
    folder: Path,
    config: Mapping[str, Any],
    model: Any,
    tokenizer: HFTokenizer,
    options: LoadOptions,
    *,
    stop_tokens: frozenset[int] = frozenset(),
    variant: str = "",
    **more: Any,
) -> ModelInfo:
    """`more` replaces or adds fields of the result. `stop_tokens`: those that the files do not
    list; `variant`: changes of the model's KV that its files do not show."""
    generation = read_json(folder / "generation_config.json")
    text = config.get("text_config") or config
    model_type = str(config.get("model_type"))
    fields: dict[str, Any] = {
        "model_type": model_type,
        "context_length": context_length(text, options),
        "vocab_size": int(text.get("vocab_size") or config.get("vocab_size") or 0),
        "stop_tokens": stop_tokens | stop_ids(config, text, generation, tokenizer),
        "fingerprint": fingerprint(folder, options) + variant,
        "weights_bytes": weights_bytes(model),
        "precision": precision(model),
        "chat_template": tokenizer.chat_template,
        "sampling": sampling_defaults(generation),
        "embedding": embedding_of(folder, text),
        "notes": tokenizer.notes,
        **dialect(tokenizer),
    }
    return ModelInfo(**(fields | more))


def stop_ids(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: HFTokenizer,
) -> frozenset[int]:
    found: set[int] = set()
    own = getattr(tokenizer.backend, "eos_token_id", None)
    for named in (config.get("eos_token_id"), text.get("eos_token_id"), own):
        found |= _ids(named)
    return frozenset(found | _ids(generation.get("eos_token_id")))


def _ids(named: Any) -> set[int]:
    if isinstance(named, int):
        return {named}
    return {i for i in named if isinstance(i, int)} if isinstance(named, list) else set()


def weights_bytes(model: Any) -> int:
    once = {id(value): value for _, value in tree_flatten(model.parameters())}
    return sum(int(value.nbytes) for value in once.values())


def precision(model: Any) -> Literal["float32", "low"]:
    """`float32` only when every weight is."""
    dtypes = {p.dtype for _, p in tree_flatten(model.parameters())}
    return "float32" if dtypes <= {mx.float32, mx.int32, mx.int64, mx.bool_} else "low"
