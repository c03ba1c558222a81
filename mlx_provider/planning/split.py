"""How many bytes of each array a rank has of a model that is split over several.

What splits a model when it is loaded is run here on arrays that are never computed, so what is
told is what will be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_flatten

from ..families.sharding import BY_LAYERS, Summed, restorer, shard
from ..upstream.pipelines import layers_of

INNER = "language_model"
"""Of a model with a tower: what is split; the rest stays on rank 0."""
SUMMING = (ShardedToAllLinear, QuantizedShardedToAllLinear, Summed)
"""Modules whose results are summed over the ranks."""


@dataclass(frozen=True)
class Ranks:
    """In place of `mlx.core.distributed.Group`: all that splitting asks of one."""

    count: int
    own: int = 0

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.own


@dataclass(frozen=True)
class Split:
    """A model over ranks."""

    nbytes: Sequence[Mapping[str, int]]
    """Of each array that a rank has, by its path; where heads are split of one, as all have the
    same, towers apart."""
    sums: int = 0
    """All-sums of a hidden state in a pass."""
    ranks: int = 1
    gathers_logits: bool = False
    """The head is split, too: a token's logits are gathered."""
    layers: tuple[range, ...] = ()
    """Of each rank, where whole layers are split: each hands a hidden state on to the next, and the
    last one's is gathered."""

    def held(self, rank: int) -> Mapping[str, int]:
        return self.nbytes[rank if self.layers else 0]

    @property
    def handed(self) -> int:
        """Hidden states that a rank sends another one in a pass."""
        return max(0, len(self.layers) - 1)


def split(model: Any, ranks: int, kind: str = "") -> Split:
    """`model`, as `described` gives it, over `ranks`, which changes it. `kind`: its type.

    Raises `UnsupportedModel` for what cannot be split, or not by so many.
    """
    if ranks == 1:
        return Split([sizes(model)])
    part = model if hasattr(model, "shard") else getattr(model, INNER, model)
    put_back = restorer(model)
    if shard(part, Ranks(ranks), kind or "the model") == BY_LAYERS:
        put_back()
        return _layered(model, part, ranks, put_back)
    modules = [module for _, module in model.named_modules()]
    linear = sum(isinstance(each, SUMMING) for each in modules)
    groups = [module for module in modules if vars(module).get("sharding_group") is not None]
    heads = sum("lm_head" in module for module in groups)
    sums = linear + len(groups) - heads
    return Split([_unwrapped(model)], sums, ranks, gathers_logits=heads > 0)


def _layered(model: Any, part: Any, ranks: int, put_back: Callable[[], None]) -> Split:
    held, layers = [], []
    for rank in range(ranks):
        shard(part, Ranks(ranks, rank), "")
        held.append(sizes(model))
        layers.append(layers_of(part))
        put_back()
    return Split(held, ranks=ranks, layers=tuple(layers))


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
