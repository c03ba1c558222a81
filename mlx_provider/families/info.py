"""The `ModelInfo` of a loaded model, from its folder, its weights and its tokenizer.

The files of sentence-transformers (5.x) describe how texts become vectors: `modules.json` lists the
modules after the model, `1_Pooling/config.json` selects the states,
`config_sentence_transformers.json` has the prefixes of inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadRequest
from ..records import Embedding, LoadOptions, ModelInfo, Pooling
from .checkpoint import (
    context_length,
    fingerprint,
    read_json,
    read_modules,
    sampling_defaults,
    text_fields,
)
from .tokenizer import HFTokenizer
from .tokenizer.template_probe import dialect

Config = Mapping[str, Any]
MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
"""From the pooling modes of sentence-transformers to ours."""
FLAG = "pooling_mode_"
SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
"""The model itself is the first."""
WIDTHS = ("hidden_size", "n_embd", "d_model", "hidden_dim")
"""Names in a config for the length of a hidden state."""
BOTH_SIDES = "its tokens attend to both sides, which the model that serves it does not"
NO_STATES = "the states below its output matrix were not found"  # a refusal that `text` adds


def embedding_of(folder: Path, config: Mapping[str, Any]) -> Embedding:
    """How texts become vectors. Broken files are a `refusal`. `config`: that of the text model."""
    try:
        return _read(folder, config)
    except BadRequest as error:
        return Embedding(refusal=error.message)


def _read(folder: Path, config: Mapping[str, Any]) -> Embedding:
    prompts = read_json(folder / "config_sentence_transformers.json")
    # class names without their packages, which differ between releases
    modules = [str(module.get("type")).rpartition(".")[2] for module in read_modules(folder)]
    pooling, refusal = _pooling(read_json(folder / "1_Pooling" / "config.json"))
    both_sides = config.get("use_bidirectional_attention") or config.get("is_causal") is False
    others = [module for module in modules if module not in SUPPORTED_MODULES]
    named = _texts(prompts.get("prompts"))
    default = prompts.get("default_prompt_name")
    return Embedding(
        width=_width(config),
        pooling=pooling,
        normalise="Normalize" in modules or not modules,  # by default
        prompts=named,
        default_prompt=default if isinstance(default, str) and default in named else "",
        refusal=(
            (BOTH_SIDES if both_sides else "")
            or (f"what follows it is not supported: {', '.join(others)}" if others else "")
            or refusal
            or ("" if _width(config) else "its config.json names no width of its states")
        ),
    )


def _width(config: Mapping[str, Any]) -> int:
    return next((config[name] for name in WIDTHS if type(config.get(name)) is int), 0)


def _pooling(config: Mapping[str, Any]) -> tuple[Pooling | None, str]:
    named = config.get("pooling_mode")
    flags = [name for name, on in config.items() if name.startswith(FLAG) and on is True]
    modes = [named] if isinstance(named, str) else [flag.removeprefix(FLAG) for flag in flags]
    if not modes:  # the files say nothing
        return None, ""
    known: dict[str, Pooling] = {**MODES, **{mode: mode for mode in get_args(Pooling)}}
    found = [known[mode] for mode in modes if mode in known]
    if len(modes) != 1 or not found:
        return None, f"its pooling is not supported: {', '.join(modes)}"
    if config.get("include_prompt") is False and found[0] == "mean":
        return None, "its pooling leaves out the tokens of prompts, which is not supported"
    return found[0], ""


def _texts(found: object) -> dict[str, str]:
    pairs = found.items() if isinstance(found, Mapping) else ()
    return {str(name): text for name, text in pairs if isinstance(text, str)}


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
    """`more` replaces or adds fields. `stop_tokens`: those that the files do not list. `variant`: a
    text that names changes of the KV besides the files. Raises `BadRequest`, `UnsupportedModel`."""
    generation = read_json(folder / "generation_config.json")
    text = text_fields(config)
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
    config: Config, text: Config, generation: Config, tokenizer: HFTokenizer
) -> frozenset[int]:
    """The ids of end tokens that the configs and the tokenizer give."""
    named = [fields.get("eos_token_id") for fields in (config, text, generation)]
    named.append(getattr(tokenizer.backend, "eos_token_id", None))
    return frozenset[int]().union(*map(_ids, named))


def _ids(named: Any) -> set[int]:
    if isinstance(named, int):
        return {named}
    return {i for i in named if isinstance(i, int)} if isinstance(named, list) else set()


def weights_bytes(model: Any) -> int:
    """Bytes of all weights. A matrix that two layers share counts once."""
    once = {id(value): value for _, value in tree_flatten(model.parameters())}
    return sum(int(value.nbytes) for value in once.values())


def precision(model: Any) -> Literal["float32", "low"]:
    """`float32` if every floating weight is, and none is quantised."""
    dtypes = {p.dtype for _, p in tree_flatten(model.parameters())}
    return "float32" if dtypes <= {mx.float32, mx.int32, mx.int64, mx.bool_} else "low"
