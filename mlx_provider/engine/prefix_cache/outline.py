"""The tree of stored prefixes as figures: how it branches, and where it was of use."""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.figures import PrefixNode
from .tree import Node

SHOWN = 40
"""Nodes of a large tree that are told."""


def outline(roots: Iterable[Node], most: int = SHOWN) -> list[PrefixNode]:
    """Parents before children, what was used last first; at most so many."""
    found: list[PrefixNode] = []
    todo = [(0, node) for root in roots for node in root.children.values()]
    todo.sort(key=_age)
    while todo and len(found) < most:
        depth, node = todo.pop()
        found.append(_told(depth, node))
        todo += sorted(((depth + 1, child) for child in node.children.values()), key=_age)
    return found


def _age(placed: tuple[int, Node]) -> int:
    return placed[1].used


def _told(depth: int, node: Node) -> PrefixNode:
    return PrefixNode(
        depth=depth,
        start=node.start,
        tokens=len(node.tokens),
        bytes=node.nbytes,
        hits=node.hits,
        resumable=node.complete or node.snapshot is not None,
    )
