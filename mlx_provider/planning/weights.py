"""What a rank holds of the weights, what of them a token makes it read, and what it multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import BadRequest, UnsupportedModel
from ..families.estimate import Fields
from .split import INNER, Split, sizes, split

_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_STATE_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_TAKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token")


@dataclass(frozen=True)
class Share:
    """Of one rank, in bytes unless said otherwise."""

    split: int
    """Its part of what is divided."""
    replicated: int
    """What every rank has: embedding, norms, routers, the head where upstream leaves it whole."""
    tower: int
    """Towers for images and sound, which rank 0 alone has."""
    read: int
    """What each pass reads, experts and output matrix apart."""
    head: int
    """The output matrix, which draws tokens."""
    experts: int
    taken: float
    """Share of the experts that a token takes."""
    products: float
    """Floating-point operations of a token in matrix products, the head's left out."""

    def weights(self, rank: int) -> int:
        return self.split + self.replicated + (self.tower if rank == 0 else 0)

    def read_by(self, rows: int) -> float:
        """By a pass of so many rows, whose experts are drawn apart from each other."""
        return self.read + self.experts * (1 - (1 - self.taken) ** rows)


@dataclass(frozen=True)
class _Array:
    """One array of the model."""

    kind: str
    """`embedding`, `head`, `tower`, `experts` or `layer`."""
    whole: int
    own: int
    """Bytes of it on one rank."""
    values: int
    """Weights in it, packed ones counted."""
    common: bool
    """Every rank has all of it."""

    @property
    def multiplied(self) -> float:
        return 2 * self.values * self.own / max(1, self.whole)


def shares(model: Any, text: Fields, ranks: int) -> tuple[tuple[Share, ...], Split]:
    """The share of each of `ranks`, and how the model, from `described`, is split.

    `text`: the fields of its config. Raises `BadRequest`, `UnsupportedModel`.
    """
    kinds = dict(_kinds(model))
    values = dict(_values(model))
    whole, taken = sizes(model), _taken(text, model)
    try:
        found = split(model, ranks)
    except UnsupportedModel:
        _check_heads(text, ranks)
        raise
    held = [_held(found, rank, whole) for rank in range(ranks)]
    common = {path for path in whole if all(own[path] == whole[path] for own in held)}
    every = [
        [_Array(kinds[p], whole[p], own[p], values[p], common=p in common) for p in whole]
        for own in held
    ]
    return tuple(_added(arrays, taken) for arrays in every), found


def _held(found: Split, rank: int, whole: Mapping[str, int]) -> Mapping[str, int]:
    """Bytes of every array on a rank; parts were renamed where heads are split, and stay whole."""
    own = found.held(rank)
    return {path: own.get(path, 0 if found.layers else size) for path, size in whole.items()}


def _check_heads(text: Fields, ranks: int) -> None:
    """Raise `BadRequest` where heads do not divide; fewer KV heads than ranks may be repeated."""
    heads, kv_heads = _first(text, _HEADS), _first(text, _KV_HEADS)
    if heads % ranks:
        raise _undivided(f"{heads} attention heads", heads, ranks)
    if kv_heads % ranks and ranks % kv_heads:
        raise _undivided(f"{kv_heads} key-value heads", kv_heads, ranks)
    for name in _STATE_HEADS:
        if (count := _first(text, (name,))) % ranks:
            raise _undivided(f"{count} heads of a recurrent state", count, ranks)


def _undivided(what: str, heads: int, ranks: int) -> BadRequest:
    fitting = [n for n in range(2, 2 * ranks) if heads % n == 0]
    hint = f": take {' or '.join(map(str, fitting))} machines" if fitting else ""
    return BadRequest(f"{what} do not divide by {ranks} ranks{hint}", param="machines")


def _first(text: Fields, names: tuple[str, ...]) -> int:
    return next((n for name in names if isinstance(n := text.get(name), int)), 0)


def _added(arrays: list[_Array], taken: float) -> Share:
    of = {kind: [a for a in arrays if a.kind == kind] for kind in _KINDS}
    text = [a for a in arrays if a.kind != "tower"]
    return Share(
        split=sum(a.own for a in text if not a.common),
        replicated=sum(a.own for a in text if a.common),
        tower=sum(a.whole for a in of["tower"]),
        read=sum(a.own for a in of["layer"]),
        # a tied embedding is the head, too
        head=sum(a.own for a in of["head"] or of["embedding"]),
        experts=sum(a.own for a in of["experts"]),
        taken=taken,
        products=sum(a.multiplied for a in of["layer"])
        + taken * sum(a.multiplied for a in of["experts"]),
    )


_KINDS = ("embedding", "head", "tower", "experts", "layer")


def _kinds(model: Any) -> Iterator[tuple[str, str]]:
    modules = dict(model.named_modules())
    has_tower = isinstance(getattr(model, INNER, None), nn.Module)
    for path, _ in tree_flatten(model.parameters()):
        module = modules.get(path.rpartition(".")[0])
        yield path, _kind(path, module, outside=has_tower and not path.startswith(f"{INNER}."))


def _kind(path: str, module: Any, *, outside: bool) -> str:
    if outside:
        return "tower"
    if "lm_head" in path.split("."):
        return "head"
    if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
        return "embedding"
    return "experts" if "SwitchLinear" in type(module).__name__ else "layer"


def _values(model: Any) -> Iterator[tuple[str, int]]:
    """Weights that a token is multiplied with; packed matrices hold several in 32 bits."""
    modules: Mapping[str, Any] = dict(model.named_modules())
    for path, array in tree_flatten(model.parameters()):
        layer, _, name = path.rpartition(".")
        bits = getattr(modules.get(layer), "bits", None)
        matrix = name == "weight" and array.ndim >= 2
        yield path, array.size * (32 // bits if bits else 1) if matrix else 0


def _taken(text: Fields, model: Any) -> float:
    """Share of the experts that a token takes; 1 where the config does not tell."""
    modules = (m for _, m in model.named_modules() if "SwitchLinear" in type(m).__name__)
    experts = max((module.weight.shape[0] for module in modules), default=0)
    taken = _first(text, _TAKEN)
    return min(1.0, taken / experts) if experts and taken else 1.0
