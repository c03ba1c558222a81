"""Loads models of mlx-vlm without its server, and calls them.

From `upstream.mlx_vlm`: `embed` makes embeddings of a processor's arrays, `has_mrope` tells whether
rotary positions have three axes, `language_logits` gives the logits of token ids. They read nothing
of a request from the model object, and leave nothing there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...errors import BadRequest, UnsupportedModel, wrong_option
from ...records import LoadOptions
from ...upstream.mlx_lm import apply_adapter
from ...upstream.mlx_vlm import embed, has_mrope, language_logits, library
from ..checkpoint import read_json
from ..layers import expand, route_attention

__all__ = ["embed", "has_mrope", "language_logits"]


def load_model(
    folder: Path, options: LoadOptions, *, patch: AbstractContextManager[Any] | None = None
) -> Any:
    """The mlx-vlm model of a folder, with its weights in memory. It never reads weights that
    `sanitize` drops (an MTP head), nor those outside the text model if `options.modality` is
    `text`. `patch` is active while mlx-vlm loads. Raises `UnsupportedModel`, or `BadRequest` (no
    weights, weights that do not fit the config, code that is not allowed)."""
    config = read_json(folder / "config.json")
    if config.get("model_file") and not options.trust_remote_code:
        raise wrong_option(
            "trust_remote_code",
            f"{folder.name} brings code of its own ({config['model_file']}), which is not allowed",
        )
    try:
        with patch or nullcontext():
            model = library().load_model(folder, lazy=True)
    except FileNotFoundError as error:
        raise BadRequest(f"{folder} is not a complete MLX model: {error}", param="model") from error
    except ValueError as error:
        kind = config.get("model_type")
        if "not supported" in str(error):
            raise UnsupportedModel(f"mlx-vlm has no model of type {kind!r}") from error
        raise BadRequest(f"weights of {folder.name} do not fit type {kind!r}: {error}") from error
    if options.adapter is not None:
        model = _with_adapter(model, options.adapter)
    if options.dtype is not None:
        expand(model, options.dtype)
    if options.modality == "text":
        # like mlx-vlm for a checkpoint without the weights of a part (utils.py,
        # `_drop_modules_without_weights`)
        for name, part in list(model.items()):
            if name != "language_model" and isinstance(part, nn.Module):
                setattr(model, name, None)
    mx.eval(model.parameters())
    return model


def _with_adapter(model: Any, adapter: Path) -> Any:
    adapted = apply_adapter(library().apply_lora_layers, model, adapter)
    # upstream (trainer/peft/utils.py 0.7.10) ignores tensors that the model lacks
    known = {name for name, _ in tree_flatten(adapted.parameters())}
    files = (str(path) for path in adapter.glob("*.safetensors"))
    lost = {str(name) for file in files for name in mx.load(file)} - known
    if lost:
        raise wrong_option(
            "adapter",
            f"{adapter} is of another model: this one has no {min(lost)} "
            f"({len(lost)} such tensors)",
        )
    adapted.eval()
    return adapted


@contextmanager
def replace_attribute(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is `function` inside the block. For the `patch` of `load_model`."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def load_with_processor(folder: Path, options: LoadOptions) -> tuple[Any, Any]:
    """The model, with `route_attention`, and its processor. Raises as `load_model`."""
    model = load_model(folder, options)
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModel(f"{type(model).__module__} cannot generate text from a chat")
    trust = options.trust_remote_code
    processor = library().load_processor(folder, True, trust_remote_code=trust)
    images = library().load_image_processor(folder, trust_remote_code=trust)
    if images is not None:
        processor.image_processor = images
    route_attention(model.language_model)
    return model, processor


def model_inputs(
    processor: Any, text: str, images: list[Any], image_token: int | None
) -> dict[str, np.ndarray]:
    """The processor's output for a rendered prompt, as numpy arrays. Raises `ValueError`."""
    fixed = {"add_special_tokens": False, "image_token_index": image_token}
    made = library().prepare_inputs(processor, images=images or None, prompts=text, **fixed)
    return {key: np.array(value) for key, value in made.items() if isinstance(value, mx.array)}
