"""The tree compared with a plain list of prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.engine.prefix_cache.tree import (
    Ids,
    Node,
    add,
    as_ids,
    check,
    match,
    new_root,
    nodes,
    remove,
    split,
)

PATHS = st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=9), max_size=12)


@dataclass(frozen=True)
class Tokens:
    """A payload that consists of its tokens, so that the tests detect a wrong cut."""

    ids: Ids
    held = None

    @property
    def length(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Tokens:
        return Tokens(self.ids[start:stop])


def put(root: Node, path: list[int]) -> Node:
    ids = as_ids(path)
    found = match(root, ids, len(ids))
    parent = root
    if found.steps:
        node, agreed = found.steps[-1]
        parent = node if agreed == len(node.tokens) else split(node, agreed)
    if found.shared == len(ids):
        return parent
    rest = ids[found.shared :]
    return add(parent, rest, Tokens(rest), complete=True)


def shared(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def text(node: Node) -> list[int]:
    return [int(t) for each in node.path() for t in each.segment.ids]


@given(PATHS, st.lists(st.integers(-2, 2), max_size=10), st.integers(0, 10))
def test_walk_finds_the_longest_stored_prefix(
    paths: list[list[int]], query: list[int], limit: int
) -> None:
    root = new_root()
    for path in paths:
        put(root, path)
        check(root)
    limit = min(limit, len(query))
    found = match(root, as_ids(query), limit)
    best = max((shared(p, query[:limit]) for p in paths), default=0)
    assert found.shared == best == sum(agreed for _, agreed in found.steps)
    closest = [p for p in paths if shared(p, query[:limit]) == best]
    goes_on = [p[best] for p in closest if len(p) > best] if best < limit else []
    if goes_on:
        assert found.diverged_at == best
        assert found.stored_token in goes_on
        assert found.stored_token != query[best]
    else:
        assert found.diverged_at is None
        assert found.stored_token is None


@given(PATHS, st.randoms())
def test_removing_leaves_keeps_the_other_paths(paths: list[list[int]], dice) -> None:
    root = new_root()
    for path in paths:
        put(root, path)
    check(root)
    while leaves := [node for node in nodes(root) if not node.children]:
        gone = dice.choice(leaves)
        left = [text(leaf) for leaf in leaves if leaf is not gone]
        remove(gone)
        check(root)
        for path in left:
            assert match(root, as_ids(path), len(path)).shared == len(path)
    assert not root.children


def test_structure_errors_are_refused() -> None:
    root = new_root()
    leaf = put(root, [1, 2, 3])
    put(root, [1, 2, 4])
    with pytest.raises(ValueError, match="no cut"):
        split(leaf, 0)
    with pytest.raises(ValueError, match="first token"):
        add(root, as_ids([1]), Tokens(as_ids([1])), complete=True)
    with pytest.raises(ValueError, match="leaf"):
        remove(next(node for node in nodes(root) if node.children))


def test_check_sees_broken_structure() -> None:
    root = new_root()
    leaf = put(root, [1, 2, 3])
    check(root)
    leaf.start = 1
    with pytest.raises(AssertionError, match="start"):
        check(root)
