"""Weights of a checkpoint that do not belong to the text model.

mlx-lm 0.32.2 refuses a checkpoint with weights that the model's `sanitize` does not know
(mlx_lm/utils.py, `load_model`: `load_weights(strict=True)`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from .backbone_alone import whole_names

log = logging.getLogger(__name__)

OTHER_PART = re.compile(
    r"vision|visual|image|video|audio|speech|multi_?modal|^mm_|projector|connector|resampler"
    r"|perceiver|aligner|^mtp|nextn|eagle|medusa|^rotary_emb$"
)
"""Modules outside the text model: towers, their projectors, drafting heads, and rotary frequencies,
which old checkpoints store."""
SHOWN = 4


class Selective(nn.Module):
    """A mixin for an mlx-lm model class that loads only the weights of the text model."""

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        weights = whole_names(self, weights)
        own = getattr(super(), "sanitize", None)
        return weights if own is None else own(weights)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
        """Raises `ValueError` for missing weights, and for unknown weights of the text model."""
        if strict and not isinstance(file_or_weights, str):
            file_or_weights = _own(self, dict(file_or_weights))
        super().load_weights(file_or_weights, strict)
        return self


def selective(model_class: type[Any]) -> type[Any]:
    """The subclass is in the same module, because upstream looks up names there."""
    place = {"__module__": model_class.__module__}
    return type(model_class.__name__, (Selective, model_class), place)


def _own(model: nn.Module, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = dict(tree_flatten(model.parameters())).keys()
    apart = {name for name in given.keys() - known if _elsewhere(model, name)}
    missing, unknown = known - given.keys(), given.keys() - known - apart
    if missing and unknown:
        raise ValueError(
            f"the checkpoint lacks {_listed(missing)}, and holds {_listed(unknown)} that its "
            "architecture does not have; the two name their weights unlike each other, which the "
            "`sanitize` of a model's class mends"
        )
    if missing:
        raise ValueError(f"the checkpoint lacks {_listed(missing)}; download it again")
    if unknown:
        raise ValueError(
            f"the checkpoint holds {_listed(unknown)}, which its architecture does not have; "
            "its config.json must name the architecture that it was made with"
        )
    if apart:
        log.info("left out, as the text model has no such parts: %s", ", ".join(_parts(apart)))
    return [(name, value) for name, value in given.items() if name not in apart]


def _elsewhere(model: nn.Module, name: str) -> bool:
    """Whether a weight belongs to another part, by the first module on its path that the model
    lacks."""
    at: Any = model
    for step in name.split("."):
        inside = _inside(at, step)
        if inside is None:
            return OTHER_PART.search(step) is not None
        at = inside
    return False


def _inside(at: Any, step: str) -> Any:
    if isinstance(at, Mapping):
        return at.get(step)
    if isinstance(at, list) and step.isdigit() and int(step) < len(at):
        return at[int(step)]
    return None


def _parts(names: Iterable[str]) -> list[str]:
    found = set()
    for name in names:
        steps = name.split(".")
        at = next(i for i, step in enumerate(steps) if OTHER_PART.search(step))
        found.add(".".join(steps[: at + 1]))
    return sorted(found)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"{len(ordered)} weights ({', '.join(ordered[:SHOWN])}{more})"
