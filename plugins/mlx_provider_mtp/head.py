"""The MTP head. It joins a hidden state and the next token, and runs one layer. It uses the
embedding and the output matrix of its model. Its weights stay quantised as they are stored."""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_provider import BadRequest
from mlx_provider.families.caches import PackedRows
from mlx_provider.families.layers import expand, route_attention
from mlx_provider.families.vision.model import head as output_matrix
from mlx_provider.families.vision.patches import step_positions

from .checkpoint import Tensors, read

MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
"""Modes of quantised weights without biases, by bits and group size (mlx 0.32.4)."""
NO_LANGUAGE = "the model is not one of mlx-lm's or mlx-vlm's"
NO_ATTENTION = "no layer of the model is known to have attention, of which its head has one"


def load_into(module: nn.Module, tensors: Tensors, language: Any) -> None:
    """Load `tensors` into the head `module`. If the text model `language` was dequantised to
    float32, so is the head. Raises `BadRequest` if the tensors do not fit."""
    nn.quantize(module, class_predicate=partial(_form, tensors))
    _check(module, tensors)
    module.load_weights(list(tensors.items()))
    quantised = any(name.endswith(".scales") for name, _ in tree_flatten(language.parameters()))
    if language.model.norm.weight.dtype == mx.float32 and not quantised:
        expand(module, "float32")
    module.eval()
    mx.eval(module.parameters())
    route_attention(module)


def _form(tensors: Tensors, name: str, layer: Any) -> dict[str, Any] | bool:
    """How `layer` is quantised, by the shapes of its tensors, because the config sometimes lacks a
    head that was added later; false: it is not quantised."""
    weight, scales = tensors.get(f"{name}.weight"), tensors.get(f"{name}.scales")
    if weight is None or scales is None or not hasattr(layer, "to_quantized"):
        return False
    inputs = layer.weight.shape[-1]
    bits, group = 32 * weight.shape[-1] // inputs, inputs // scales.shape[-1]
    affine = f"{name}.biases" in tensors
    mode = "affine" if affine else MODES.get((bits, group), "affine")
    return {"group_size": group, "bits": bits, "mode": mode}


def _check(module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Raises `BadRequest` for a tensor that is missing, unknown or of another shape."""
    wanted = {name: value.shape for name, value in tree_flatten(module.parameters())}
    for name in sorted(wanted.keys() | tensors.keys()):
        have = tensors[name].shape if name in tensors else None
        if have != wanted.get(name):
            why = f"mtp.{name} is {have or 'missing'}, and should be {wanted.get(name) or 'absent'}"
            raise BadRequest(f"the MTP head does not fit its model: {why}", param="drafter")


class Head(nn.Module):  # type: ignore[misc]
    """Predicts the token after the next one. Published with Qwen3-Next (transformers leaves it out;
    vLLM: `qwen3_next_mtp.py`). Its normalised output is the hidden state for the next token."""

    def __init__(self, layer: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden, eps)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden, eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, states: PackedRows) -> mx.array:
        """`embedded`, `hidden`, result: (T, hidden), for T tokens of some rows. Only the result of
        each row's last token is valid."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        joined = self.fc(mx.concatenate(pair, axis=-1))[:, None]
        (layer,) = self.layers
        more = {}
        if "position_ids" in inspect.signature(type(layer).__call__).parameters:  # of mlx-vlm
            more["position_ids"] = step_positions(states.offset)
        found: mx.array = self.norm(layer(joined, mask=None, cache=states, **more))
        return found[:, 0]


class BoundHead:
    """A head with the embedding and the output matrix of its text model, `language`."""

    def __init__(self, head: Head, language: Any) -> None:
        self.module = head
        self._language = language

    def after(self, tokens: mx.array, hidden: mx.array, states: PackedRows) -> mx.array:
        """States (T, width) after T tokens; only that of each row's last token is valid. `hidden`:
        the states from which the tokens were drawn."""
        return self.module(self._language.model.embed_tokens(tokens), hidden, states)

    def blank(self) -> mx.array:
        """Zeros in place of a hidden state, (1, width)."""
        norm = self.module.norm.weight
        return mx.zeros((1, norm.shape[0]), norm.dtype)

    def best(self, hidden: mx.array) -> mx.array:
        """Most likely next tokens (T,)."""
        return mx.argmax(self.logits(hidden), axis=-1)

    def logits(self, hidden: mx.array) -> mx.array:
        return output_matrix(self._language, hidden)


def language_of(model: Any) -> Any:
    """The text model in a model of mlx-lm or mlx-vlm, or `None`."""
    language = getattr(model, "language_model", model)
    below = getattr(language, "model", None)
    parts = hasattr(language, "args") and hasattr(below, "embed_tokens") and hasattr(below, "norm")
    return language if parts else None


def attention_layer(language: Any) -> int | None:
    """Index of the first layer with attention; `None`: unknown."""
    for index, layer in enumerate(getattr(language.model, "layers", ())):
        if not getattr(layer, "is_linear", True):
            return index
    return None


def load_head(folder: Path, model: Any) -> BoundHead:
    """Load the head in the folder for `model`, whose text model `language_of` finds, as `load_into`
    does. Raises `BadRequest` if it does not fit."""
    language = language_of(model)
    at, args = attention_layer(language), language.args
    if at is None:
        raise BadRequest(NO_ATTENTION, param="drafter")
    head = Head(type(language.model.layers[at])(args, at), args.hidden_size, args.rms_norm_eps)
    load_into(head, read(folder, language.model.norm.weight.dtype), language)
    return BoundHead(head, language)
