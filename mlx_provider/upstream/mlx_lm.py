"""Loads models with mlx-lm 0.32.2 (< 0.33), and also two kinds that its `load_model` refuses
(mlx_lm/utils.py): checkpoints with weights that the model's `sanitize` does not know, and those of
a backbone without an output matrix, whose names lack the complete model's prefix."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import BadRequest, NotInstalled, UnsupportedModel, wrong_option
from ..isolation import plugin_call
from .runtime import LINUX, keep_file_limit

log = logging.getLogger(__name__)
BACKBONE, HEAD = "model", "lm_head"
OTHER_PART = re.compile(
    r"vision|visual|image|video|audio|speech|multi_?modal|^mm_|projector|connector|resampler"
    r"|perceiver|aligner|^mtp|nextn|eagle|medusa|^rotary_emb$"
)
"""Modules outside the text model: towers, projectors, drafting heads, stored rotary frequencies."""
SHOWN = 4
"""Most names of weights in an error."""


def whole_names(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights of a backbone under the names of the complete `model`. Without an output matrix in
    `weights`, `model` then uses its embedding as one. Weights of a complete model do not change."""
    backbone, given = model.get(BACKBONE), set(map(_first, weights))
    if not isinstance(backbone, nn.Module) or BACKBONE in given:
        return weights
    parts = {_first(name) for name, _ in tree_flatten(backbone.parameters())}
    if not parts <= given:
        return weights
    if HEAD in model and HEAD not in given and hasattr(model.args, "tie_word_embeddings"):
        model.args.tie_word_embeddings = True
        del model[HEAD]
    return {
        f"{BACKBONE}.{name}" if _first(name) in parts else name: value
        for name, value in weights.items()
    }


def _first(name: str) -> str:
    return name.partition(".")[0]


class Selective(nn.Module):
    """The mixin of `selective` for an mlx-lm model class."""

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        weights = whole_names(self, weights)
        own = getattr(super(), "sanitize", None)
        return weights if own is None else own(weights)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
        """Raises `ValueError` for missing weights, and for unknown weights of the text model."""
        if strict and not isinstance(file_or_weights, str):
            file_or_weights = _select_weights(self, dict(file_or_weights))
        super().load_weights(file_or_weights, strict)
        return self


def selective(model_class: type[Any]) -> type[Any]:
    """A subclass that loads only the weights of the text model."""
    place = {"__module__": model_class.__module__}  # upstream looks up names there
    return type(model_class.__name__, (Selective, model_class), place)


def _select_weights(model: nn.Module, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = dict(tree_flatten(model.parameters())).keys()
    other = {name for name in given.keys() - known if _is_of_other_part(model, name)}
    missing, unknown = known - given.keys(), given.keys() - known - other
    if missing and unknown:
        raise ValueError(
            f"the checkpoint lacks {_list_names(missing)}, and holds {_list_names(unknown)} that "
            "its architecture does not have; the two name their weights unlike each other, which "
            "the `sanitize` of a model's class mends"
        )
    if missing:
        raise ValueError(f"the checkpoint lacks {_list_names(missing)}; download it again")
    if unknown:
        raise ValueError(
            f"the checkpoint holds {_list_names(unknown)}, which its architecture does not have; "
            "its config.json must name the architecture that it was made with"
        )
    if other:
        log.info("left out, as the text model has no such parts: %s", ", ".join(_parts(other)))
    return [(name, value) for name, value in given.items() if name not in other]


def _is_of_other_part(model: nn.Module, name: str) -> bool:
    """Judged by the name of the first module on the weight's path that the model lacks."""
    at: Any = model
    for step in name.split("."):
        if isinstance(at, list):
            at = dict(enumerate(at)).get(int(step) if step.isdecimal() else -1)
        else:
            at = at.get(step) if isinstance(at, Mapping) else None
        if at is None:
            return OTHER_PART.search(step) is not None
    return False


def _parts(names: Iterable[str]) -> list[str]:
    found = set()
    for name in names:
        steps = name.split(".")
        at = next(i for i, step in enumerate(steps) if OTHER_PART.search(step))
        found.add(".".join(steps[: at + 1]))
    return sorted(found)


def _list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"{len(ordered)} weights ({', '.join(ordered[:SHOWN])}{more})"


Classes = Callable[[dict[str, Any]], tuple[type[Any], type[Any]]]
"""From a config to the classes of the model and of its arguments."""


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    """Of transformers."""
    renderer: Any
    """mlx-lm's wrapper, if its chat template is a Python function of mlx-lm; else `None`."""
    stop_tokens: frozenset[int]
    config: dict[str, Any]


def _utils() -> Any:
    try:
        with keep_file_limit():
            import mlx_lm.utils as upstream
    except ImportError as error:
        raise NotInstalled(f"MLX cannot be loaded ({error}): {LINUX}") from error
    return upstream


def supports(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has the classes for a config. Raises `NotInstalled`."""
    _utils()
    if not isinstance(config.get("model_type"), str):
        return False
    try:
        classes(config)
    except (ValueError, AttributeError):  # the latter if the module is no model
        return False
    return True


def classes(config: Mapping[str, Any]) -> tuple[type[Any], type[Any]]:
    """Mlx-lm's classes of the model and of its arguments. Raises `ValueError` if it has none."""
    found: tuple[type[Any], type[Any]] = _utils()._get_classes(dict(config))
    return found


def load(
    folder: Path,
    *,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    classes: Classes | None = None,
) -> Loaded:
    """A folder's text model and tokenizer, without weights of other parts. Raises `NotInstalled`,
    `UnsupportedModel` (weights that fit no known architecture), `BadRequest` (files, adapter)."""
    upstream = _utils()

    def choose(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        model_class, arguments = (classes or upstream._get_classes)(config)
        return selective(model_class), arguments

    trust = {"trust_remote_code": trust_remote_code}
    try:
        model, config = upstream.load_model(folder, get_model_classes=choose, **trust)
        if adapter is not None:
            model = apply_adapter(upstream.load_adapters, model, adapter)
        model.eval()
        tokenizer = upstream.load_tokenizer(folder, trust, eos_token_ids=config.get("eos_token_id"))
    except FileNotFoundError as error:
        raise BadRequest(f"{folder} is not a complete MLX model: {error}", param="model") from error
    except ValueError as error:
        raise UnsupportedModel(f"{folder}: {error}", param="model") from error
    stops = frozenset(int(i) for i in tokenizer.eos_token_ids)
    renderer = None if tokenizer._chat_template is None else tokenizer
    return Loaded(model, tokenizer._tokenizer, renderer, stops, config)


def apply_adapter(load: Callable[[Any, str], Any], model: Any, adapter: Path) -> Any:
    """The model with an adapter, by upstream's `load`. Raises `BadRequest` if that fails."""
    return plugin_call(
        lambda: load(model, str(adapter)),
        lambda fault: wrong_option("adapter", f"{adapter} cannot be used: {fault.summary}"),
    )


def quantise_cache(cache: Sequence[Any], bits: int, group_size: int) -> list[Any]:
    """An empty row cache with its plain KV layers quantised. Upstream has no quantised form of
    windows and recurrent states (cache.py 0.32.2)."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    made = partial(QuantizedKVCache, group_size=group_size, bits=bits)
    return [made() if type(layer) is KVCache else layer for layer in cache]


def quantisable(cache: Sequence[Any]) -> list[Any]:
    """The layers of a row cache that `quantise_cache` would replace."""
    from mlx_lm.models.cache import KVCache

    return [layer for layer in cache if type(layer) is KVCache]
