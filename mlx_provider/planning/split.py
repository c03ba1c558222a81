"""How many bytes of each array a rank has of a model that is split over several.

What splits a model when it is loaded is run here on arrays that are never computed, so what is
told is what will be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_flatten

from ..families.sharding import BY_LAYERS, Summed, refused, shard

INNER = "language_model"
"""Of a model with a tower: what is split; the rest stays on rank 0."""
SUMMING = (ShardedToAllLinear, QuantizedShardedToAllLinear, Summed)
"""Modules whose results are summed over the ranks."""


@dataclass(frozen=True)
class Ranks:
    """In place of `mlx.core.distributed.Group`: all that splitting asks of one."""

    count: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class Split:
    """A model over ranks."""

    nbytes: Mapping[str, int]
    """Of each array on one rank, by its path; all ranks have the same, towers apart."""
    sums: int
    """All-sums of a hidden state in a pass."""
    gathers_logits: bool
    """The head is split, too: a token's logits are gathered."""


def split(model: Any, ranks: int, kind: str = "") -> Split:
    """`model`, as `described` gives it, over `ranks`, which changes it. `kind`: its type.

    Raises `UnsupportedModel` for what cannot be split, or not by so many.
    """
    if ranks == 1:
        return Split(sizes(model), sums=0, gathers_logits=False)
    part = model if hasattr(model, "shard") else getattr(model, INNER, model)
    if shard(part, Ranks(ranks), kind or "the model") == BY_LAYERS:
        raise refused(kind or "the model", ranks, "its heads or columns do not divide")
    modules = [module for _, module in model.named_modules()]
    linear = sum(isinstance(each, SUMMING) for each in modules)
    groups = [module for module in modules if vars(module).get("sharding_group") is not None]
    heads = sum("lm_head" in module for module in groups)
    return Split(_unwrapped(model), linear + len(groups) - heads, gathers_logits=heads > 0)


def _unwrapped(model: Any) -> dict[str, int]:
    """`sizes`, by the paths from before parts were wrapped to be summed."""
    wrapped = [name for name, module in model.named_modules() if isinstance(module, Summed)]
    found = sizes(model)
    for name in wrapped:
        inner = f"{name}.part."
        found = {path.replace(inner, f"{name}.", 1): size for path, size in found.items()}
    return found


def sizes(model: Any) -> dict[str, int]:
    """Bytes of every array of a model, by its path; of one that stands in two places once."""
    once = {id(array): (path, array.nbytes) for path, array in tree_flatten(model.parameters())}
    return dict(once.values())
