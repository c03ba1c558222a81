"""Loads weights of a vision model with the classes of mlx-vlm, without its server.

Models are called below `LanguageModel.__call__`, which stores positions of the last request on the
model object (mlx_vlm/models, 0.7.10, `_rope_deltas`, `_position_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import BadRequest, UnsupportedModel, wrong_option
from ...isolation import Isolation
from ...records import LoadOptions
from ...upstream.mlx_vlm import library
from ..checkpoint import read_json
from ..expand import expand


def load_model(
    folder: Path, options: LoadOptions, *, patch: AbstractContextManager[Any] | None = None
) -> Any:
    """The mlx-vlm model of a checkpoint folder, with its weights in memory, read once.

    Weights that `sanitize` drops (an MTP head) are never read, nor those outside the text model if
    `options.modality` is `text`. `patch` is active while loading. Raises `UnsupportedModel`, or
    `BadRequest` (no weights, weights that do not fit the config, code that was not allowed).
    """
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
        _drop_other_parts(model)
    mx.eval(model.parameters())
    return model


def _drop_other_parts(model: Any) -> None:
    """Like mlx-vlm for a checkpoint without the weights of a part (utils.py,
    `_drop_modules_without_weights`)."""
    for name, part in list(model.items()):
        if name != "language_model" and isinstance(part, nn.Module):
            setattr(model, name, None)


def _with_adapter(model: Any, adapter: Path) -> Any:
    with Isolation() as trying:
        adapted = library().apply_lora_layers(model, str(adapter))
    if trying.fault is not None:
        raise wrong_option("adapter", f"{adapter} cannot be used: {trying.fault.summary}")
    _check_adapter(adapted, adapter)
    adapted.eval()
    return adapted


def _check_adapter(adapted: Any, adapter: Path) -> None:
    """Check that no tensor is lost: upstream (trainer/peft/utils.py 0.7.10) drops unknown ones."""
    known = {name for name, _ in tree_flatten(adapted.parameters())}
    files = (str(path) for path in adapter.glob("*.safetensors"))
    lost = {str(name) for file in files for name in mx.load(file)} - known
    if lost:
        raise wrong_option(
            "adapter",
            f"{adapter} is of another model: this one has no {min(lost)} "
            f"({len(lost)} such tensors)",
        )


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is `function` inside the block: a `patch` of upstream for `load_model`."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
