"""Computes how much of a path fits the budget. Imports no mlx."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .tree import ID_BYTES, Node


@dataclass(frozen=True)
class Fit:
    stop: int
    states: frozenset[int]
    new_bytes: int


def fit(
    path: Sequence[Node],
    length: int,
    token_bytes: int,
    states: Mapping[int, int],
    spare: Mapping[int, int],
    *,
    prompted: float,
    complete: bool,
    budget: int,
) -> Fit:
    """The longest head from which a row can resume, and the snapshots that fit with it.

    The next prompt may tokenize the reply differently, so a head that ends in the reply also keeps
    the last snapshot of the prompt.

    `path`: stored nodes that match completely. `length`: tokens of the whole path. `token_bytes`:
    of a token that is not stored. `states`: bytes of new snapshots by token count. `spare`: the
    same for those kept only as the end of a shorter head. `prompted`: tokens before the reply.
    """
    held = {node.stop: node.snapshot.nbytes for node in path if node.snapshot is not None}
    guessed = {node.stop for node in path if node.guessed}
    sizes = _Sizes(path, token_bytes + ID_BYTES)
    new = {at: size for at, size in states.items() if at not in held}
    needed = sum(size for at, size in held.items() if at not in guessed) + sum(new.values())
    if sizes.of(max(length, sizes.shared)) + needed <= budget:
        return Fit(length, frozenset({*held, *new}), sizes.beyond(length) + sum(new.values()))
    whole = length if complete else max((n.stop for n in path if n.complete), default=0)
    stop = sizes.reach(budget, whole)
    every = {**spare, **new, **held}
    ends = sorted(at for at in every if at > stop and sizes.of(at) + every[at] <= budget)
    safe = [at for at in ends if at <= prompted][-1:]
    choices = [{*safe, at} for at in ends]
    fitting = [ats for ats in choices if sizes.of(max(ats)) + _total(every, ats) <= budget]
    kept: set[int] = fitting[-1] if fitting else set()
    if kept:
        stop = max(kept)
        left = budget - sizes.of(stop) - _total(every, kept)
        others = sorted(at for at in {**new, **held} if at < stop and at not in kept)
        kept |= {*_within(left, [*others[:1], *reversed(others[1:])], every)}
    added = _total(every, kept - {*held})
    return Fit(stop, frozenset(kept), sizes.beyond(stop) + added)


def _total(sizes: Mapping[int, int], ats: Iterable[int]) -> int:
    return sum(sizes[at] for at in ats)


def _within(left: int, ats: Iterable[int], sizes: Mapping[int, int]) -> Iterable[int]:
    for at in ats:
        if sizes[at] <= left:
            left -= sizes[at]
            yield at


@dataclass(frozen=True)
class _Sizes:
    path: Sequence[Node]
    each: int

    @property
    def shared(self) -> int:
        return self.path[-1].stop if self.path else 0

    def of(self, stop: int) -> int:
        stored = sum(_share(node, stop) for node in self.path if node.start < stop)
        return stored + self.beyond(stop)

    def beyond(self, stop: int) -> int:
        """Bytes of the tokens between the stored ones and `stop`."""
        return max(0, stop - self.shared) * self.each

    def reach(self, budget: int, limit: int) -> int:
        for node in self.path:
            size = node.token_bytes
            if size > budget or node.stop > limit:
                within = node.start + budget * len(node.tokens) // size
                return min(within, limit)
            budget -= size
        return min(limit, self.shared + budget // self.each)


def _share(node: Node, stop: int) -> int:
    return node.token_bytes * (min(stop, node.stop) - node.start) // len(node.tokens)
