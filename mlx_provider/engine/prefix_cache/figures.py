"""Statistics of the prefix cache: its content and its hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...protocol.health import PrefixCacheFigures, PrefixNode
from .store import Store
from .tree import Node

MAX_OUTLINED = 40


@dataclass
class Counters:
    lookups: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        return self.reused_tokens / max(1, self.prompt_tokens)


def report(store: Store, counters: Counters, budget: int) -> dict[str, Any]:
    everything = list(store.nodes())
    return {
        "entries": sum(not node.children for node in everything),
        "nodes": len(everything),
        "snapshots": sum(node.snapshot is not None for node in everything),
        "tokens": sum(len(node.tokens) for node in everything),
        "bytes": store.tally.nbytes,
        "buffers": store.tally.buffers,
        "budget": budget,
        **vars(counters),
        "evicted_bytes": store.evicted_bytes,
        "hit_rate": counters.hit_rate,
    }


def figures(store: Store, counters: Counters, budget: int) -> PrefixCacheFigures:
    found = report(store, counters, budget)
    shown = PrefixCacheFigures.model_fields.keys() & found.keys()
    return PrefixCacheFigures(
        **{name: found[name] for name in shown}, tree=outline(store.roots.values())
    )


def outline(roots: Iterable[Node], limit: int = MAX_OUTLINED) -> list[PrefixNode]:
    """At most `limit` nodes, parents before children, most recently used first."""
    found: list[PrefixNode] = []
    todo = [(0, node) for root in roots for node in root.children.values()]
    todo.sort(key=_age)
    while todo and len(found) < limit:
        depth, node = todo.pop()
        found.append(_outlined(depth, node))
        todo += sorted(((depth + 1, child) for child in node.children.values()), key=_age)
    return found


def _age(placed: tuple[int, Node]) -> int:
    return placed[1].used


def _outlined(depth: int, node: Node) -> PrefixNode:
    return PrefixNode(
        depth=depth,
        start=node.start,
        tokens=len(node.tokens),
        bytes=node.nbytes,
        hits=node.hits,
        resumable=node.complete or node.snapshot is not None,
    )
