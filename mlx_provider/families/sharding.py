"""Splits a text model over processes. Each computes with its share of heads, channels and columns.

Call `shard(language_model, group, kind)` once, before any weight is evaluated. If upstream's class
has its own `shard`, that is called after a check of the head counts, which it divides without
regard to the remainder. Any other class is split here, if all its layers consist of the parts
below. A model that cannot be split so is split by layers if upstream's class has a pipeline. The
processes then work one after another, so this is the second choice.

| part | by its modules | split by |
|---|---|---|
| attention | `q_proj`, `k_proj`, `v_proj`, `o_proj` | heads; norms of one head stay whole |
| gated delta net | `in_proj_qkv`, `conv1d`, `out_proj`, ... | key heads and value heads |
| MLP | `gate_proj`, `up_proj`, `down_proj` | inner columns |
| experts | `switch_mlp`, perhaps a shared expert | inner columns of every expert |

Embedding, norms, routers and output matrix stay whole. With fewer KV heads than processes, all
processes with the queries of one KV head have a copy of it, as in mlx-lm 0.32.2's own `shard`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_map

from ..errors import UnsupportedModel
from ..records import LoadOptions
from ..upstream import pipelines

log = logging.getLogger(__name__)

HEADS = ("n_heads", "num_heads", "num_attention_heads")
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
STATE_HEADS = ("num_k_heads", "num_v_heads")
RATIOS = ("num_key_value_groups", "repeats", "n_rep")
"""Upstream's names for heads, for those of keys and values, for those of a recurrent state, and for
queries per KV head."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "out_proj")
DELTA_BY_HEAD = ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj")
"""Other names: rows of a key head stand together there, in either matrix."""
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = ("shared_expert", "shared_experts")
ROUTING = ("gate", "router", "shared_expert_gate")
SPREAD, JOINED = "all-to-sharded", "sharded-to-all"
BY_HEADS, BY_LAYERS = "heads", "layers"


def parted(options: LoadOptions) -> bool:
    """Whether the model is split. Raises `UnsupportedModel` for options that a split model cannot
    have."""
    group = options.group
    if group is None or group.size() == 1:
        return False
    if options.adapter is not None:
        raise UnsupportedModel(
            f"an adapter cannot be split over {group.size()} processes: merge it into the weights "
            "(mlx_lm.fuse), or serve it on one machine",
            param="adapter",
        )
    return True


def shard(language_model: Any, group: Any, kind: str) -> str:
    """Keep only the share of this process in the model. Evaluates nothing. `kind`: its type, for
    messages.

    Returns `BY_HEADS` or `BY_LAYERS` and logs it, with the layers of this process. Raises
    `UnsupportedModel` for a model that cannot be split, or not by so many processes.
    """
    put_back = restorer(language_model)
    if not (undivided := _problem(_by_heads, language_model, group)):
        log.info("%s is split by heads", kind)
        return BY_HEADS
    put_back()
    if not (unlayered := _problem(_by_layers, language_model, group)):
        here = pipelines.layers_of(language_model)
        log.info("%s is split by layers: %d to %d are here", kind, here.start, here.stop - 1)
        return BY_LAYERS
    put_back()
    reason = f"{undivided}, and it does not split layer by layer: {unlayered}"
    raise refused(kind, group.size(), reason)


def restorer(model: Any) -> Callable[[], None]:
    """Returns a function that restores the children and attributes of all modules of `model`,
    because a split that fails may have changed some."""
    modules = model.modules() if isinstance(model, nn.Module) else []
    before = [(part, dict(part), dict(vars(part)), type(part)) for part in modules]

    def put_back() -> None:
        for part, children, attributes, kind in before:
            part.__class__ = kind
            dict.clear(part)
            dict.update(part, children)
            part.__dict__.clear()
            part.__dict__.update(attributes)

    return put_back


def _problem(split: Callable[[Any, Any], None], model: Any, group: Any) -> str:
    """Why this split failed. Empty: it works."""
    try:
        split(model, group)
    except ZeroDivisionError:  # upstream's `shard` divides by the remaining KV heads
        return f"its KV heads do not divide by {group.size()}"
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


def _by_heads(model: Any, group: Any) -> None:
    if not hasattr(model, "layers"):
        raise ValueError("it has no known layers")
    if hasattr(model, "shard"):
        _by_upstream(model, group)
        return
    for index, layer in enumerate(model.layers):
        _split_layer(layer, group, f"layer {index}")


def _by_layers(model: Any, group: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError("it is not a module")
    pipelines.split(model, group)


def refused(kind: str, processes: int, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{kind} cannot be split over {processes} processes: {reason}; "
        "take fewer processes, or one machine",
        param="model",
    )


def settle(model: Any) -> None:
    """Evaluate weights one by one, so that at most one complete weight is in memory of each
    process."""
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)


class Summed(nn.Module):
    """A part whose results are sums over columns that are distributed over processes."""

    def __init__(self, part: nn.Module, group: Any) -> None:
        super().__init__()
        self.part = part
        self.group = group

    def __call__(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(self.part(x), group=self.group)


# ---- by upstream


def _by_upstream(model: Any, group: Any) -> None:
    parts = [m for layer in model.layers for m in layer.modules()]
    for part in parts:
        for name in (*HEADS, *STATE_HEADS):
            _divides(vars(part).get(name, 0), group.size(), name)
    before = [(part, _kv_rows(part), _count(part, KV_HEADS)) for part in parts if _kv_rows(part)]
    model.shard(group)
    for part, rows, heads in before:
        own = _count(part, KV_HEADS)
        if own < 1 or _kv_rows(part) * heads != rows * own:
            raise ValueError(f"{heads} KV heads do not divide by {group.size()}")


def _kv_rows(part: nn.Module) -> int:
    known = "k_proj" in part and _count(part, KV_HEADS)
    return int(part.k_proj.weight.shape[0]) if known else 0


# ---- here


def _split_layer(layer: Any, group: Any, where: str) -> None:
    for name, part in layer.children().items():
        if not _has_weights(part):
            continue
        if not isinstance(part, nn.Module) or (split := _way(part)) is None:
            raise ValueError(f"`{name}` of {where} is of no known kind ({type(part).__name__})")
        split(layer, name, part, group)


Way = Callable[[Any, str, Any, Any], None]


def _way(part: nn.Module) -> Way | None:
    for names, more, split in _WAYS:
        if all(name in part for name in names):
            return split if _inside(part) <= {*names, *more} else None
    return _stays if set(part) <= {"weight", "bias"} and _is_vector(part) else None


def _inside(part: nn.Module) -> set[str]:
    """Names of the parts with weights."""
    return {name for name, value in part.items() if _has_weights(value)}


def _has_weights(value: Any) -> bool:
    """Modules also store options, which may be lists or mappings."""
    return any(isinstance(leaf, mx.array) for _, leaf in tree_flatten(value))


def _is_vector(part: Any) -> bool:
    return "weight" in part and part.weight.ndim == 1


def _stays(layer: Any, name: str, part: Any, group: Any) -> None:
    """A norm: every process has the whole hidden state."""


def _split_attention(layer: Any, name: str, part: Any, group: Any) -> None:
    size, heads, kv_heads = group.size(), _count(part, HEADS), _count(part, KV_HEADS)
    if not heads or not kv_heads:
        raise ValueError(f"`{name}` has no known head counts")
    _divides(heads, size, "heads")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"{kv_heads} KV heads do not divide by {size}")
    width = part.k_proj.weight.shape[0] // kv_heads
    for norm in ("q_norm", "k_norm"):
        if norm in part and part[norm].weight.shape != (width,):
            raise ValueError(f"`{norm}` is not of one head")
    for own in ("k_proj", "v_proj"):
        _repeat_heads(part[own], kv_heads, max(1, size // kv_heads))
    for own in ATTENTION[:-1]:
        _replace(part, own, SPREAD, group)
    _replace(part, "o_proj", JOINED, group)
    _set(part, HEADS, heads // size)
    _set(part, KV_HEADS, max(1, kv_heads // size))
    _set(part, RATIOS, (heads // size) // max(1, kv_heads // size))


def _repeat_heads(linear: Any, heads: int, times: int) -> None:
    def repeated(value: mx.array) -> mx.array:
        each = value.reshape(heads, -1, *value.shape[1:])
        return mx.repeat(each, times, axis=0).reshape(-1, *value.shape[1:])

    if times > 1:
        linear.update(tree_map(repeated, linear.parameters()))


def _split_delta(layer: Any, name: str, part: Any, group: Any) -> None:
    """Split like mlx-lm 0.32.2's own `shard`."""
    size, keys = group.size(), part.key_dim
    for heads in STATE_HEADS:
        _divides(getattr(part, heads), size, heads)
    for own in ("conv1d", "in_proj_qkv"):
        if own in part:
            shard_inplace(part[own], lambda path, value: (0, [keys, 2 * keys]), group=group)
    for own in ("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"):
        if own in part:
            shard_inplace(part[own], SPREAD, group=group)
    for own in ("dt_bias", "A_log"):
        part[own] = mx.contiguous(mx.split(part[own], size)[group.rank()])
    _replace(part, "out_proj", JOINED, group)
    part.conv1d.groups //= size
    for own in (*STATE_HEADS, "key_dim", "value_dim", "conv_dim"):
        setattr(part, own, getattr(part, own) // size)


def _split_mlp(layer: Any, name: str, part: Any, group: Any) -> None:
    for own in MLP:
        _replace(part, own, JOINED if own == "down_proj" else SPREAD, group)


def _split_experts(layer: Any, name: str, part: Any, group: Any) -> None:
    for own in ("switch_mlp", *SHARED):
        if own in part:
            _split_in_place(part[own], own, group)
    if hasattr(part, "sharding_group"):
        part.sharding_group = group
    else:
        layer[name] = Summed(part, group)


def _split_in_place(expert: Any, name: str, group: Any) -> None:
    if _inside(expert) != set(MLP):
        raise ValueError(f"`{name}` is of no known kind")
    for own in MLP:
        way = JOINED if own == "down_proj" else SPREAD
        _check(expert[own], own, way, group.size())
        shard_inplace(expert[own], way, group=group)
    if "bias" in expert.down_proj:  # otherwise every process would add it
        expert.down_proj.bias = expert.down_proj.bias / group.size()


_NORMS = ("q_norm", "k_norm")
_STATE = ("A_log", "dt_bias", "norm")
_WAYS: tuple[tuple[tuple[str, ...], tuple[str, ...], Way], ...] = (
    (ATTENTION, (*_NORMS, "rope", "rotary_emb"), _split_attention),
    (DELTA, _STATE, _split_delta),
    (DELTA_BY_HEAD, _STATE, _split_delta),
    (("switch_mlp",), (*SHARED, *ROUTING), _split_experts),
    (MLP, (), _split_mlp),
)
"""The modules that identify a part, its optional modules, and its split function."""


def _replace(part: Any, name: str, way: str, group: Any) -> None:
    _check(part[name], name, way, group.size())
    part[name] = shard_linear(part[name], way, group=group)


def _check(linear: Any, name: str, way: str, size: int) -> None:
    """Check that each array divides. Columns of quantised arrays must divide in whole groups."""
    if way == SPREAD:
        return _divides(linear.weight.shape[-2], size, f"rows of `{name}`")
    _divides(linear.weight.shape[-1], size, f"columns of `{name}`")
    if "scales" in linear:
        groups = f"groups of {linear.group_size} columns of `{name}`"
        _divides(linear.scales.shape[-1], size, groups)
    return None


def _divides(count: int, size: int, what: str) -> None:
    if count % size:
        raise ValueError(f"{count} {what} do not divide by {size}")


def _count(part: Any, names: tuple[str, ...]) -> int:
    return next((int(value) for value in _counts(part, names)), 0)


def _counts(part: Any, names: tuple[str, ...]) -> Iterator[int]:
    yield from (vars(part)[name] for name in names if isinstance(vars(part).get(name), int))


def _set(part: Any, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if name in vars(part):
            setattr(part, name, value)
