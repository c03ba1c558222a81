"""Loading of models with mlx-lm 0.32.2 (< 0.33)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRequest, NotInstalled, UnsupportedModel, wrong_option
from ..isolation import Isolation
from .file_limit import file_limit_kept

INSTALL = "install one of: pip install 'mlx-provider[cpu]', pip install 'mlx-provider[cuda13]'"
Classes = Callable[[dict[str, Any]], tuple[type[Any], type[Any]]]


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    renderer: Any
    """mlx-lm's wrapper, if its chat template is a Python function of mlx-lm; else `None`."""
    stop_tokens: frozenset[int]
    config: dict[str, Any]


def _utils() -> Any:
    try:
        with file_limit_kept():
            import mlx_lm.utils as upstream
    except ImportError as error:
        raise NotInstalled(f"MLX cannot be loaded ({error}); {INSTALL}") from error
    return upstream


def supports(config: Mapping[str, Any]) -> bool:
    _utils()
    if not isinstance(config.get("model_type"), str):
        return False
    try:
        classes(config)
    except ValueError:
        return False
    return True


def classes(config: Mapping[str, Any]) -> tuple[type[Any], type[Any]]:
    """Raises `ValueError` if there are none."""
    found: tuple[type[Any], type[Any]] = _utils()._get_classes(dict(config))
    return found


def load(
    folder: Path,
    *,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    classes: Classes | None = None,
) -> Loaded:
    """Load the text model and the tokenizer of a folder, without weights of other parts. Raises
    `UnsupportedModel` for an unknown architecture or weights that do not belong to it,
    `BadRequest` for a broken folder."""
    upstream = _utils()
    from .other_parts import selective

    def chosen(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        model_class, arguments = (classes or upstream._get_classes)(config)
        return selective(model_class), arguments

    try:
        model, config = upstream.load_model(
            folder, get_model_classes=chosen, trust_remote_code=trust_remote_code
        )
        if adapter is not None:
            model = _adapted(upstream, model, adapter)
        model.eval()
        tokenizer = upstream.load_tokenizer(
            folder,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except FileNotFoundError as error:
        raise BadRequest(f"{folder} is not a complete MLX model: {error}", param="model") from error
    except ValueError as error:
        raise UnsupportedModel(f"{folder}: {error}", param="model") from error
    stops = frozenset(int(i) for i in tokenizer.eos_token_ids)
    renderer = None if tokenizer._chat_template is None else tokenizer
    return Loaded(model, tokenizer._tokenizer, renderer, stops, config)


def _adapted(upstream: Any, model: Any, adapter: Path) -> Any:
    """Raises `BadRequest` if the adapter cannot be loaded."""
    with Isolation() as trying:
        return upstream.load_adapters(model, str(adapter))
    reason = trying.fault.summary if trying.fault is not None else ""
    raise wrong_option("adapter", f"{adapter} cannot be used: {reason}")


def quantised(cache: Sequence[Any], bits: int, group_size: int) -> list[Any]:
    """An empty cache with its plain KV layers quantised. Upstream has no quantised form of windows
    and recurrent states (cache.py 0.32.2)."""
    from mlx_lm.models.cache import QuantizedKVCache

    plain = set(map(id, quantisable(cache)))
    return [
        QuantizedKVCache(group_size=group_size, bits=bits) if id(c) in plain else c for c in cache
    ]


def quantisable(cache: Sequence[Any]) -> list[Any]:
    from mlx_lm.models.cache import KVCache

    return [layer for layer in cache if type(layer) is KVCache]
