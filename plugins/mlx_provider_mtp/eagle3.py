"""EAGLE-3: a small decoder over the outputs of three layers of a model.

Its classes are from mlx-vlm (mlx_vlm/speculative/drafters/eagle3 0.7.10), called layer by layer
with the states of many rows. Config and tensors can have the form of the package `speculators`, or
the form for SGLang, which has no `transformer_layer_config` and names the first layer `midlayer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import BadRequest
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.checkpoint import read_json

from .checkpoint import read_all
from .drafting import HeadDrafting
from .head import NO_LANGUAGE, language_of
from .row_states import States
from .weights import Named, load_into

NAME = "eagle3"
NONE_GIVEN = "it needs an EAGLE-3 checkpoint for this model: name its folder (draft_model)"
FIRST = ("midlayer.", "layers.0.")
MOST_LAYERS = 8
"""Of the head itself. Published ones have one."""
READ = 3
"""Layers of the model that it reads."""


def is_eagle3(folder: Path) -> bool:
    """Whether the config is of EAGLE-3. Raises `BadRequest` if it cannot be read."""
    config = read_json(folder / "config.json")
    kinds = [config.get("model_type"), config.get("speculators_model_type")]
    classes = config.get("architectures") or []
    return NAME in kinds or any(NAME in str(each).lower() for each in classes)


def problem(folder: Path | None, model: Any) -> str:
    """Why the checkpoint cannot draft for a loaded model; empty: it can. Reads no weights."""
    if folder is None:
        return NONE_GIVEN
    try:
        if not is_eagle3(folder):
            return f"{folder} holds no EAGLE-3 head"
        language = language_of(model.model)
        if language is None:
            return NO_LANGUAGE
        return _unlike(_config(folder, language), language, model.info.vocab_size)
    except MLXProviderError as error:
        return error.message


def _unlike(config: Any, language: Any, vocab: int) -> str:
    text, count = config.transformer_layer_config, len(language.model.layers)
    pairs = {
        "hidden size": (config.target_hidden_size, language.args.hidden_size),
        "vocabulary": (text.vocab_size, vocab),
        "number of layers that are read": (len(config.capture_layer_ids), READ),
    }
    for what, (own, models) in pairs.items():
        if own != models:
            return f"it was trained for another model: its {what} is {own}, here it is {models}"
    if not 1 <= text.num_hidden_layers <= MOST_LAYERS:
        return f"it has {text.num_hidden_layers} layers, at most {MOST_LAYERS} are supported"
    _module(config)
    wrong = [layer for layer in config.capture_layer_ids if not 0 <= layer < count]
    return f"it reads layer {wrong[0]} of a model that has {count}" if wrong else ""


def _config(folder: Path, language: Any) -> Any:
    """mlx-vlm's config of the checkpoint. Raises `BadRequest` for one that it cannot read."""
    from mlx_vlm.speculative.drafters.eagle3 import ModelConfig

    given = read_json(folder / "config.json")
    text = given.setdefault("transformer_layer_config", given)
    if (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        summary = "its eagle_config counts the layers that it reads in a way that is not known"
        raise BadRequest(summary, param="draft_model")
    if not given.get("eagle_aux_hidden_state_layer_ids"):  # else mlx-vlm uses the head itself
        count = len(language.model.layers)
        given["eagle_aux_hidden_state_layer_ids"] = [2, count // 2, count - 3]
    try:
        given.setdefault("draft_vocab_size", text["vocab_size"])
        return ModelConfig.from_dict(given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


def _module(config: Any) -> Any:
    """mlx-vlm's head without weights, not evaluated. Raises `BadRequest` for sizes that no
    head can have."""
    from mlx_vlm.speculative.drafters.eagle3 import Model

    try:
        return Model(config)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


class EagleHead:
    """An EAGLE-3 decoder with the embedding of the model that it was trained for."""

    def __init__(self, module: Any, embedding: Any) -> None:
        self.module = module
        self._embedding = embedding
        self.layers = len(module.layers)
        self.shown: Sequence[int] = tuple(module.config.capture_layer_ids)

    def after(self, tokens: mx.array, hidden: mx.array, states: Sequence[States]) -> mx.array:
        module = self.module
        embedded, found = self._embedding(tokens)[:, None], hidden[:, None]
        if hidden.shape[-1] != module.hidden_size:  # states of the model, not of the head
            normed = found if module.input_norm is None else module.input_norm(found)
            found = module.fc(normed)
        for index, (layer, own) in enumerate(zip(module.layers, states, strict=True)):
            inputs = (embedded, found) if index == 0 else (found,)
            found = layer(*inputs, own.masks(), own, own.offset)
        return found[:, 0]

    def best(self, hidden: mx.array) -> mx.array:
        normed = self.module.norm(hidden)
        head = self.module.lm_head
        logits = self._embedding.as_linear(normed) if head is None else head(normed)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        return tokens if self.module.d2t is None else tokens + self.module.d2t[tokens]

    def blank(self) -> mx.array:
        weight = self.module.norm.weight
        return mx.zeros((1, READ * self.module.target_hidden_size), weight.dtype)


def load_eagle3(folder: Path, model: Any) -> EagleHead:
    """The head in a folder, for a model of mlx-lm or mlx-vlm that `problem` accepts.

    It shares the model's embedding if its own is a copy. Raises `BadRequest` if its
    weights do not fit.
    """
    language = language_of(model)
    config = _config(folder, language)
    module = _module(config)
    stored = read_all(folder, language.model.norm.weight.dtype)
    tensors = module.sanitize({_name(name): each for name, each in stored.items()})
    own = config.embed_requires_grad or module.hidden_size != config.target_hidden_size
    if not own:
        module.pop("embed_tokens")
        tensors = {name: each for name, each in tensors.items() if "embed_tokens" not in name}
    load_into(module, tensors, language, Named("the EAGLE-3 head", "", "draft_model"))
    return EagleHead(module, module.embed_tokens if own else language.model.embed_tokens)


def drafting(folder: Path, model: Any, kv_bytes: int) -> HeadDrafting:
    """See `load_eagle3` and `HeadDrafting`."""
    name = f"the EAGLE-3 head in {folder.name}"
    return HeadDrafting(load_eagle3(folder, model), name, kv_bytes=kv_bytes)


def _name(name: str) -> str:
    name = name.removeprefix("model.")
    return FIRST[1] + name.removeprefix(FIRST[0]) if name.startswith(FIRST[0]) else name
