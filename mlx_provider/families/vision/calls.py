"""Any model of mlx-vlm through its public calls: its processor, embeddings and language model.

Nothing of a request is read from the model object or stored there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModel
from ...records import LoadOptions
from ...upstream.mlx_vlm import embedded, has_mrope, language_logits, library
from ..attention import route
from .loading import load_model
from .slices import Slices, in_slices, towers

__all__ = [
    "has_mrope",
    "language_logits",
    "load_with_processor",
    "model_inputs",
    "prompt_features",
    "text_rows",
]


def load_with_processor(folder: Path, options: LoadOptions) -> tuple[Any, Any]:
    model = load_model(folder, options)
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModel(f"{type(model).__module__} cannot generate text from a chat")
    trust = options.trust_remote_code
    processor = library().load_processor(folder, True, trust_remote_code=trust)
    images = library().load_image_processor(folder, trust_remote_code=trust)
    if images is not None:
        processor.image_processor = images
    route(model.language_model)
    return model, processor


def model_inputs(
    processor: Any, text: str, images: list[Any], image_token: int | None
) -> dict[str, np.ndarray]:
    """The processor's output for a rendered prompt, as numpy arrays. Raises `ValueError`."""
    made = library().prepare_inputs(
        processor,
        images=images or None,
        prompts=text,
        add_special_tokens=False,
        image_token_index=image_token,
    )
    return {key: np.array(value) for key, value in made.items() if isinstance(value, mx.array)}


def prompt_features(model: Any, inputs: Mapping[str, np.ndarray]) -> Slices[dict[str, mx.array]]:
    """Embeddings of a whole prompt, and the other inputs of its prefill, a slice at a time.
    `inputs`: the processor's arrays. `inputs_embeds` is (1, length, hidden); the others are
    arguments of `language_logits`."""
    arrays = {key: mx.array(value) for key, value in inputs.items()}
    return in_slices(towers(model), partial(embedded, model, arrays))


def text_rows(model: Any, tokens: mx.array) -> mx.array:
    return embedded(model, {"input_ids": tokens[None]})["inputs_embeds"]
