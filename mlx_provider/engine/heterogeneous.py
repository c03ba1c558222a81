"""Support for processes that keep different parts of a row, because their layers differ in number
or kind.

Every process runs the same engine. Its decisions depend on the memory and the kinds of the rows'
caches: which rows share a group, where prompt passes end, which prefixes stay. If processes differ,
all use the largest need and the strictest kind of any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from pydantic import TypeAdapter

from ..errors import LoadFailed
from ..isolation import Isolation
from ..records import LoadedModel, PrefillChunk, Prompt
from ..upstream.batch_caches import mergeable
from .execution.mixed_chunk import can_share_a_pass
from .memory import MemoryProfile, arrays, leaves, profile
from .prefix_cache.buffers import divisible, own_layers
from .prefix_cache.layer_kinds import Kind, Unstorable, strictest
from .replication import Replication

TRIAL_TOKENS = 4
"""Tokens of the trial that shows what a model stores in its caches."""
KINDS = tuple(Kind)
"""The least strict kind first."""


@dataclass(frozen=True)
class Kept:
    """The part of a row that one process keeps."""

    memory: MemoryProfile
    layers: int
    kind: int
    """Index in `KINDS` of the strictest layer."""
    mergeable: bool
    shares_a_pass: bool
    divisible: bool


_KEPT = TypeAdapter(Kept)


@dataclass(frozen=True)
class Heterogeneous:
    """Common limits of all processes."""

    replication: Replication
    memory: MemoryProfile
    kind: Kind
    """The strictest kind of any layer."""
    mergeable: bool
    """Whether several rows may share one cache."""
    shares_a_pass: bool
    """Whether prompt chunks may share the pass of rows that decode."""
    divisible: bool
    """Whether every process has layers that keep all tokens, of classes that can be divided."""

    def most(self, own: Sequence[float]) -> list[float]:
        """The maximum over all processes, element by element. All processes must call it at the
        same point."""
        return [max(each) for each in zip(*self.replication.gather(list(own)), strict=True)]


def compare_parts(
    model: LoadedModel, make_cache: Callable[[], list[Any]], replication: Replication
) -> Heterogeneous | None:
    """Compare the parts that the processes keep of a row. `None`: they keep the same.

    Runs on the engine thread of each process. Raises `LoadFailed` if a process cannot run its part.
    """
    with Isolation() as trying:
        own = _kept(model, make_cache())
    encoded = trying.fault.summary if trying.fault else _KEPT.dump_python(own, mode="json")
    every = replication.gather(encoded)
    if (failed := next((each for each in every if isinstance(each, str)), None)) is not None:
        raise LoadFailed(f"a process cannot run its share: {failed}")
    found = [_KEPT.validate_python(each) for each in every]
    if all(each == found[0] for each in found):
        return None
    return Heterogeneous(
        replication,
        largest([each.memory for each in found]),
        KINDS[max(each.kind for each in found)],
        all(each.mergeable for each in found),
        all(each.shares_a_pass for each in found),
        all(each.divisible for each in found),
    )


def largest(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """A profile that needs at least as much as each of them, for any number of tokens."""
    widths = {window for each in profiles for window, _ in each.windows}
    by_window = [_by_window(each) for each in profiles]
    return MemoryProfile(
        max(each.state_bytes for each in profiles),
        max(each.token_bytes for each in profiles),
        tuple((width, max(each.get(width, 0) for each in by_window)) for width in sorted(widths)),
    )


def _by_window(memory: MemoryProfile) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for window, each in memory.windows:
        found[window] = found.get(window, 0) + each
    return found


def _kept(model: LoadedModel, cache: list[Any]) -> Kept:
    tokens = [token % model.info.vocab_size for token in range(1, TRIAL_TOKENS + 1)]
    model.prefill(PrefillChunk(Prompt(tokens), 0, TRIAL_TOKENS, cache))
    mx.eval(arrays(cache))
    return Kept(
        profile(cache, TRIAL_TOKENS),
        len(leaves(cache)),
        KINDS.index(_strictest(cache)),
        mergeable(cache),
        can_share_a_pass(cache),
        _divisible(cache),
    )


def _divisible(cache: list[Any]) -> bool:
    try:
        return divisible(own_layers(cache))
    except Unstorable:
        return False


def _strictest(cache: list[Any]) -> Kind:
    try:
        return strictest(cache)
    except Unstorable:
        return Kind.APPEND  # no process keeps anything of the row
