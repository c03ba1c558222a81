"""The invariants of an engine between two steps, and of its prefix cache."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import Node, segment_of
from mlx_provider.engine.request import Phase
from mlx_provider.engine.step_output import Post

BEGUN = {Phase.PREFILL, Phase.DECODE}
"""Of several rows of a request, one may be prefilled again beside the others."""


@contextmanager
def checked_steps() -> Iterator[None]:
    """In each engine of this process."""
    original = Engine.step

    def step(engine: Engine) -> list[Post]:
        posts = original(engine)
        check_engine(engine)
        return posts

    Engine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.step = original  # type: ignore[method-assign]


def check_engine(engine: Engine) -> None:
    """Raises `AssertionError` if queue, batch, ledger and prefix cache do not agree."""
    scheduler, layout, cache = engine.scheduler, engine.batch.layout, engine.prefix_cache
    running, jobs, _merged = [*scheduler.running], scheduler.waiting, layout.merged_lengths()
    waiting = [row for job in jobs for row in job.rows]
    placed = Counter(row for group in layout.groups for row in group.rows)
    cached = [(engine.batch.cached_reply_tokens(row), len(row.tokens)) for row in running]
    check(
        ("a running row has one place in the batch", placed == Counter(running)),
        (
            "a row waits or runs, and once",
            max(Counter([*running, *waiting]).values(), default=1) == 1,
        ),
        ("no row that has ended runs", all(row.finish is None for row in running)),
        ("no running row waits", {row.request.phase for row in running} <= BEGUN),
        ("no request that has ended waits", all(job.request.unfinished_rows for job in jobs)),
        ("no prompt has more than its tokens", all(job.tokens_left >= 0 for job in jobs)),
        ("no cache has more than its row", all(0 <= has <= whole for has, whole in cached)),
        (
            "merged rows are charged",
            {r: r.merged_length for r in running if r.merged_length} == layout.merged_lengths(),
        ),
    )
    if cache is not None:
        check_integrity(cache.cache)


def check(*rules: tuple[str, bool]) -> None:
    if broken := [rule for rule, holds in rules if not holds]:
        raise AssertionError(f"not true: {broken}")


def check_integrity(cache: PrefixCache) -> None:
    """Raises `AssertionError` if an invariant of nodes or totals is broken."""
    every, totals = [*cache.nodes()], cache.totals
    nbytes = sum(node.nbytes for node in every) + sum(totals.rows.values())
    counted = nbytes, sum(node.buffers for node in every)
    rules = [(f"{counted} is counted", counted == (totals.nbytes, totals.buffers))]
    for row in {*totals.rows, *(node.row for node in every if node.row is not None)}:
        found = {node for node in every if node.row is row}
        stored = sum(segment_of(node).kv_bytes for node in found)
        path, spare = row.path, totals.rows[row]
        whole = (path[-1].stop - row.base_tokens) * segment_of(path[0]).token_bytes
        idle = row.is_prefix or spare == row.spare(path[-1].stop)
        running = [lease for lease in row.users if lease.row is row]
        base = {(lease.base, lease.base_tokens) for lease in running}
        rules += [
            ("one row runs in buffers, then not intact", len(running) <= (not row.intact)),
            ("its lease has its prefix", base <= {(row.base, row.base_tokens)}),
            ("a prefix is intact and has none", not row.is_prefix or (row.intact and not row.base)),
            ("a row counts its nodes", (found, stored) == (row.nodes, row.stored)),
            ("and what it has before them", row.lost or stored == whole),
            ("and unused capacity", row.lost or idle or (row.in_use and spare == 0)),
            ("they are on one path", {*path} <= {*path[-1].path()}),
            ("they are in its buffers", row.lost or row.base_tokens <= path[0].start),
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
    check(*rules)
