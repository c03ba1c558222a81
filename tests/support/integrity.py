"""The invariants of a prefix cache."""

from typing import cast

from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import Node, segment_of


def check_integrity(cache: PrefixCache) -> None:
    """Raises `AssertionError` if an invariant of nodes or totals is broken."""
    every, totals = [*cache.nodes()], cache.totals
    nbytes = sum(node.nbytes for node in every) + sum(totals.rows.values())
    counted = nbytes, sum(node.buffers for node in every)
    rules = [("no tree is empty", all(root.children for root in cache._roots.values()))]
    rules += [(f"{counted} is counted", counted == (totals.nbytes, totals.buffers))]
    for row in {*totals.rows, *(node.row for node in every if node.row is not None)}:
        found = {node for node in every if node.row is row}
        stored = sum(segment_of(node).kv_bytes for node in found)
        path = row.path
        rules += [
            ("a row counts its nodes", (found, stored) == (row.nodes, row.stored)),
            ("they are on one path", {*path} <= {*path[-1].path()}),
            ("they are in its buffers", row.lost or row.first <= path[0].start),
            ("it has their capacity", row.lost or path[-1].stop <= row.capacity),
        ]
    for node in every:
        parent, length = cast("Node", node.parent), len(node.tokens)
        top = parent.parent is None
        rules += [
            ("parent and child agree", parent.children.get(int(node.tokens[0])) is node),
            ("it starts where its parent ends", node.start == parent.stop and length > 0),
            ("its segment has its length", segment_of(node).length == length),
            ("a tree is complete, or no node is", top or parent.complete == node.complete),
            ("a complete node has no state", node.snapshot is None or not node.complete),
            ("its parent was used as late", top or node.used <= parent.used),
        ]
    if broken := [rule for rule, holds in rules if not holds]:
        raise AssertionError(f"not true: {broken}")
