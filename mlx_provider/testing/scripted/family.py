"""The plugin: models whose `config.json` says `"model_type": "scripted"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ... import LoadedModel, LoadOptions, ModelFamily, ModelInfo, UnsupportedModel, hookimpl

mlx_provider_api = 1

MODEL_TYPE = "scripted"


def matches(config: Mapping[str, Any]) -> int:
    return 10 if config.get("model_type") == MODEL_TYPE else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """A folder that `build` has written. Raises `UnsupportedModel` and `BadRequest`."""
    from ...families.checkpoint import context_length, fingerprint, read_json
    from ...families.tokenizer import load_tokenizer
    from .formats import END, FORMATS
    from .model import ScriptedModel

    config = read_json(folder / "config.json")
    calls = FORMATS.get(config.get("calls", ""))
    if calls is None:
        raise UnsupportedModel(f"calls of {folder} must be one of {', '.join(FORMATS)}")
    tokenizer = load_tokenizer(folder, options)
    context = context_length(config, options)
    info = ModelInfo(
        model_type=MODEL_TYPE,
        context_length=context,
        vocab_size=tokenizer.fast.get_vocab_size(),
        stop_tokens=frozenset([tokenizer.fast.token_to_id(END)]),
        fingerprint=fingerprint(folder, options),
        weights_bytes=4 * tokenizer.fast.get_vocab_size(),
        precision="float32",
        chat_template=tokenizer.chat_template,
    )
    return ScriptedModel(tokenizer.within(context), info, calls)


FAMILY = ModelFamily("scripted", matches, load, serves="models that follow a script in the prompt")


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    yield FAMILY
