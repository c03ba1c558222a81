"""mlx-vlm 0.7.10 as a library: its models, one row at a time or many, without its server.

Everything of mlx-vlm that the vision plugins touch is reached through this package's
`mlx_vlm*` modules. Models are called below `LanguageModel.__call__`, which keeps positions of
the last request on the model object (models/qwen3_vl/language.py, `_rope_deltas` and
`_position_ids`); here positions always come from the caller. Caches are mlx-lm's classes, so
that one set of batch caches serves text and vision models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import BadRequest, UnsupportedModel, wrong_option
from ..isolation import Isolation
from ..records import LoadOptions
from .checkpoint import read_json
from .expand import expand
from .file_limit import file_limit_kept

with file_limit_kept():
    from mlx_lm.models import cache as lm_cache


def load_model(
    folder: Path, options: LoadOptions, *, patch: AbstractContextManager[Any] | None = None
) -> Any:
    """The mlx-vlm model of a checkpoint folder, weights in memory, read once.

    Weights that the class does not know by design (an MTP head) are never materialised: the
    files are mapped lazily and `sanitize` drops them. Nor are those of other parts than the text
    model where `options.modality` is `text`. `patch` is active while loading.
    Raises `UnsupportedModel`, or `BadRequest` (no weights, weights that do not fit the config,
    code that was not allowed).
    """
    from mlx_vlm import utils

    config = read_json(folder / "config.json")
    if config.get("model_file") and not options.trust_remote_code:
        raise wrong_option(
            "trust_remote_code",
            f"{folder.name} brings code of its own ({config['model_file']}), which is not allowed",
        )
    try:
        with patch or nullcontext():
            model = utils.load_model(folder, lazy=True)
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
    """As mlx-vlm does itself for a checkpoint that has no weights of a part (utils.py,
    `_drop_modules_without_weights`)."""
    for name, part in list(model.items()):
        if name != "language_model" and isinstance(part, nn.Module):
            setattr(model, name, None)


def _with_adapter(model: Any, adapter: Path) -> Any:
    from mlx_vlm.utils import apply_lora_layers

    with Isolation() as trying:
        adapted = apply_lora_layers(model, str(adapter))
    if trying.fault is not None:
        raise wrong_option("adapter", f"{adapter} cannot be used: {trying.fault.told}")
    _check_adapter(adapted, adapter)
    adapted.eval()
    return adapted


def _check_adapter(adapted: Any, adapter: Path) -> None:
    """Upstream (trainer/peft/utils.py 0.7.10) drops what the model has no place for."""
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
    """`owner.name` is `function` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def weights_bytes(model: Any) -> int:
    """Bytes of all parameters; a tied matrix counts once."""
    once = {id(value): value for _, value in tree_flatten(model.parameters())}
    return sum(int(value.nbytes) for value in once.values())


class StateCache(lm_cache.ArraysCache):
    """mlx-lm's recurrent cache with the two methods that mlx-vlm's hybrid layers call.

    Upstream: `ArraysCache.update_window` and `update_recurrent`, mlx_vlm/models/cache.py 0.7.10,
    without the recording for speculation.
    """

    def extract(self, idx: int) -> StateCache:
        row = type(self)(len(self.cache))
        row.cache = [None if a is None else a[idx : idx + 1] for a in self.cache]
        return row

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: Any) -> mx.array:
        """Keep the last `width` columns of `source` (per row: those before `lengths`)."""
        span = source.shape[1] - width
        if lengths is None:
            state = mx.contiguous(source[:, span:])
        else:
            columns = mx.clip(lengths, 0, span)[:, None] + mx.arange(width)
            columns = columns.reshape(*columns.shape, *([1] * (source.ndim - 2)))
            state = mx.take_along_axis(source, columns, axis=1)
        self.cache[index] = state
        return state

    def update_recurrent(
        self, index: int, length: int, update: Callable[[Any, Any], tuple[Any, ...]]
    ) -> tuple[Any, Any]:
        """Run one state transition over `length` tokens and keep its final state."""
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state


def row_cache(language_model: Any) -> list[Any]:
    """A fresh cache for one row in mlx-lm's classes, one entry per layer."""
    if not hasattr(language_model, "make_cache"):
        return [lm_cache.KVCache() for _ in language_model.layers]
    return [_lm_class(entry) for entry in language_model.make_cache()]


def _lm_class(entry: Any) -> Any:
    kind = type(entry).__name__
    if kind == "KVCache":
        return lm_cache.KVCache()
    if kind == "RotatingKVCache":
        return lm_cache.RotatingKVCache(max_size=entry.max_size, keep=entry.keep)
    if kind == "ArraysCache":
        return StateCache(len(entry.cache))
    return entry


def head(language_model: Any, hidden: mx.array) -> mx.array:
    """Logits of hidden states, through the output matrix or the tied embedding."""
    if "lm_head" in language_model:
        logits: mx.array = language_model.lm_head(hidden)
        return logits
    tied: mx.array = language_model.model.embed_tokens.as_linear(hidden)
    return tied


def vocab_size(language_model: Any) -> int:
    """Rows of the output matrix."""
    if "lm_head" in language_model:
        return int(language_model.lm_head.weight.shape[0])
    return int(language_model.model.embed_tokens.weight.shape[0])
