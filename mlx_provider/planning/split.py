"""Which models can be split over ranks, and how many bytes of each array a rank then has.

`split` is the one place that knows. Where upstream's class has `shard`, that is run on arrays that
are never computed (mlx-lm 0.32.2, mlx-vlm 0.7.10), so what is told is what upstream will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_flatten

from ..errors import BadRequest, UnsupportedModel
from ..isolation import Isolation

INNER = "language_model"
"""Of a model with a tower: what is split; the rest stays on rank 0."""
INTO = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias"),
    )
)
"""Projections whose outputs are split."""
OUT_OF = frozenset(("o_proj", "out_proj", "down_proj"))
"""Projections whose inputs are split, and whose outputs are summed over the ranks."""
OF_KV_HEADS = frozenset(("k_proj", "v_proj"))
"""Of fewer heads than ranks, each stands on several."""
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
"""What upstream's attention calls the number of its key-value heads."""
ROUTERS = frozenset(("gate", "shared_expert_gate"))


@dataclass(frozen=True)
class Ranks:
    """In place of `mlx.core.distributed.Group`: all that `shard` asks of one."""

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


def split(model: Any, ranks: int) -> Split:
    """`model`, as `described` gives it, over `ranks`; upstream's `shard` changes it.

    Raises `UnsupportedModel` where nothing is known to split the class, `BadRequest` where its
    matrices do not divide.
    """
    if ranks == 1:
        return Split(sizes(model), sums=0, gathers_logits=False)
    shard = _upstream(model)
    with Isolation() as trying:
        return _by_projections(model, ranks) if shard is None else _sharded(model, shard, ranks)
    if trying.fault is not None and trying.fault.ours:
        raise trying.fault.error
    told = trying.fault.told if trying.fault else ""
    raise BadRequest(f"the model cannot be split over {ranks} ranks: {told}", param="machines")


def sizes(model: Any) -> dict[str, int]:
    """Bytes of every array of a model, by its path; of one that stands in two places once."""
    once = {id(array): (path, array.nbytes) for path, array in tree_flatten(model.parameters())}
    return dict(once.values())


def _upstream(model: Any) -> Callable[[Ranks], None] | None:
    parts = (model, getattr(model, INNER, None))
    found = (getattr(part, "shard", None) for part in parts)
    return next((shard for shard in found if callable(shard)), None)


def _sharded(model: Any, shard: Callable[[Ranks], None], ranks: int) -> Split:
    before = _kv_heads(model)
    with suppress(ZeroDivisionError):  # by the key-value heads that are left, where none is
        shard(Ranks(ranks))
    if before and not _kv_heads(model):
        raise BadRequest(f"{before} key-value heads do not divide by {ranks}", param="machines")
    modules = [module for _, module in model.named_modules()]
    linear = sum(isinstance(m, _SUMMING) for m in modules)
    groups = [module for module in modules if vars(module).get("sharding_group") is not None]
    heads = sum("lm_head" in module for module in groups)
    return Split(sizes(model), linear + len(groups) - heads, gathers_logits=heads > 0)


_SUMMING = (ShardedToAllLinear, QuantizedShardedToAllLinear)


def _by_projections(model: Any, ranks: int) -> Split:
    """Of mlx-vlm's classes without `shard`: by the names of projections, heads and MLPs alike.

    The embedding, the head, norms and routers stay whole.
    """
    arrays = dict(tree_flatten(model.parameters()))
    heads = _kv_heads(model)
    known = {path: array for path, array in arrays.items() if _in_layer(path)}
    if not known or not all(_is_known(path, array.ndim) for path, array in known.items()):
        raise UnsupportedModel(
            "neither the model's class nor anything of ours splits it over machines: "
            "plan it on one, or several engines behind one gateway"
        )
    return Split(
        {path: array.nbytes // _parts(path, array, ranks, heads) for path, array in arrays.items()},
        sums=len({block for path in known if (block := _summing_block(path))}),
        gathers_logits=False,
    )


def _in_layer(path: str) -> bool:
    return path.startswith(f"{INNER}.") and ".layers." in path


def _is_known(path: str, ndim: int) -> bool:
    return ndim < 2 or not INTO.isdisjoint(path.split(".")) or _stays_or_sums(path)


def _stays_or_sums(path: str) -> bool:
    return not (OUT_OF | ROUTERS).isdisjoint(path.split("."))


def _kv_heads(model: Any) -> int:
    """Of the model's attention, the fewest; 0: it has none, or does not tell."""
    attention = [module for _, module in model.named_modules() if "k_proj" in module]
    counts = [vars(each)[name] for each in attention for name in KV_HEADS if name in vars(each)]
    return min((count for count in counts if isinstance(count, int)), default=0)


def _parts(path: str, array: Any, ranks: int, kv_heads: int) -> int:
    """Into how many parts an array falls. Raises `BadRequest` where it does not divide."""
    names = set(path.split("."))
    if names & OF_KV_HEADS and kv_heads:
        ranks = min(ranks, kv_heads)
    outward = not OUT_OF.isdisjoint(names)
    if not _in_layer(path) or not (outward or names & INTO) or (outward and "bias" in names):
        return 1
    size = array.shape[-1] if outward else array.shape[_output_axis(path, array.ndim)]
    if size % ranks:
        raise BadRequest(f"{path} has {size} to divide by {ranks} ranks", param="machines")
    return ranks


def _output_axis(path: str, ndim: int) -> int:
    return 0 if "conv1d" in path else max(ndim - 2, 0)


def _summing_block(path: str) -> str:
    """The attention or MLP whose result is summed; empty: the array is not its last matrix."""
    before, _, inside = path.partition(".layers.")
    number, _, rest = inside.partition(".")
    return "" if OUT_OF.isdisjoint(path.split(".")) else f"{before}.{number}.{rest.split('.')[0]}"
