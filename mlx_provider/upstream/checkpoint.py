"""What a model folder says of itself: `config.json`, `generation_config.json`, its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadRequest
from ..plain_file import read_bounded
from ..records import LoadOptions, ModelInfo, SamplingDefaults
from .dialect import dialect
from .hf_tokenizer import HFTokenizer

LARGEST_JSON = 2**25
"""Bytes of a JSON file that describes a model; none known has a hundredth."""
DEFAULT_CONTEXT = 4096
"""Context length of a model whose config names none."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file. Raises `BadRequest`."""
    try:
        content = json.loads(read_bounded(path, LARGEST_JSON))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(content, dict):
        raise BadRequest(f"{path} does not hold a JSON object", param="model")
    return content


def describe(
    folder: Path,
    config: Mapping[str, Any],
    model: Any,
    tokenizer: HFTokenizer,
    options: LoadOptions,
    *,
    stop_tokens: frozenset[int] = frozenset(),
    **more: Any,
) -> ModelInfo:
    """`ModelInfo` of a loaded folder. `more` replaces or adds fields (media, pixels ...)."""
    generation = read_json(folder / "generation_config.json")
    text = config.get("text_config") or config
    fields: dict[str, Any] = {
        "model_type": str(config.get("model_type")),
        "context_length": context_length(text, options),
        "vocab_size": int(text.get("vocab_size") or config.get("vocab_size") or 0),
        "stop_tokens": stop_tokens | stop_ids(config, text, generation, tokenizer),
        "fingerprint": fingerprint(folder, options),
        "weights_bytes": weights_bytes(model),
        "precision": precision(model),
        "chat_template": tokenizer.chat_template,
        "sampling": sampling_defaults(generation),
        "notes": tokenizer.notes,
        **dialect(tokenizer),
    }
    return ModelInfo(**(fields | more))


def context_length(text: Mapping[str, Any], options: LoadOptions) -> int:
    """Tokens of the longest prompt plus reply: the operator's choice, else the config's."""
    return options.context_length or named_context(text) or DEFAULT_CONTEXT


def named_context(text: Mapping[str, Any]) -> int | None:
    """The context length that a config names, if any."""
    for key in ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "n_ctx"):
        if isinstance(text.get(key), int) and text[key] > 0:
            return int(text[key])
    return None


def stop_ids(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: HFTokenizer,
) -> frozenset[int]:
    """Every token that ends a reply, by any of the model's files."""
    found: set[int] = set()
    own = getattr(tokenizer.backend, "eos_token_id", None)
    for named in (config.get("eos_token_id"), text.get("eos_token_id"), own):
        found |= _ids(named)
    return frozenset(found | _ids(generation.get("eos_token_id")))


def _ids(named: Any) -> set[int]:
    if isinstance(named, int):
        return {named}
    return {i for i in named if isinstance(i, int)} if isinstance(named, list) else set()


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """generation_config.json as defaults; `do_sample: false` means greedy."""
    temperature = generation.get("temperature")
    if generation.get("do_sample") is False:
        temperature = 0.0
    return SamplingDefaults(
        temperature=temperature,
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        min_p=generation.get("min_p"),
        repetition_penalty=generation.get("repetition_penalty"),
    )


def weights_bytes(model: Any) -> int:
    """Bytes of every parameter."""
    return sum(p.nbytes for _, p in tree_flatten(model.parameters()))


def precision(model: Any) -> Literal["float32", "low"]:
    """`float32` only when every weight is."""
    dtypes = {p.dtype for _, p in tree_flatten(model.parameters())}
    return "float32" if dtypes <= {mx.float32, mx.int32, mx.int64, mx.bool_} else "low"


def fingerprint(folder: Path, options: LoadOptions) -> str:
    """Changes with the weights, the adapter or the options: names, sizes and times of files."""
    digest = hashlib.sha256(repr((options.extra, options.dtype)).encode())
    for root in (folder, options.adapter):
        if root is None:
            continue
        for path in sorted(root.glob("*")):
            if path.suffix in (".safetensors", ".json", ".jinja"):
                stat = path.stat()
                digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
