"""Chooses the positions in a prompt at which a state is worth storing. Imports no mlx.

These are message ends, image ends, and points where a prompt left a stored path (as in Marconi,
MLSys 2025). In long new text, some are guesses for another question about the same text.

Extends a stored path from a live row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...records import Prompt
from .buffers import RowBuffers
from .eviction import Fit
from .segments import RowParts, Segment
from .snapshots import Snapshot, take_snapshot
from .tree import Ids, Node, Walk, add, set_segment, set_snapshot, split

GRID = 64
"""Prefill passes start on multiples of this. The result does not change if a pass ends on one."""
WORTH_A_PASS = 64
"""Tokens that a snapshot must save: it needs its own pass, and reading the weights again costs as
much time as some tens to hundreds of tokens."""
WORTH_A_GUESS = 512
"""The same for guesses, of which about one in ten is used."""
GUESSED = (16, 4)
"""A guess is this fraction (1/n) of the new tokens before the end: for a short question after a
long text, and for one after its first pages."""
RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
INSIDE = 2
"""Further snapshots kept per path: guesses, and branch points of prompts."""


def places(
    prompt: Prompt, done: int = 0, branch: int = 0, *, grid: int = GRID, fits: int | None = None
) -> tuple[int, ...]:
    """Ascending token counts at which to store a state.

    At most 1 + `RECENT` ends, a branch, and the guesses of `GUESSED`. `done`: tokens with which the
    row resumes. `branch`: tokens before the prompt leaves another one. `grid`: positions are
    rounded down to it. `fits`: tokens that the prefix cache can hold; a longer prompt has a state
    there.
    """
    total = len(prompt.tokens)
    stop = total if fits is None else min(fits, total)
    every = [end for end in cuts_of(prompt, done) if end <= stop]
    ends = {*every[:1], *every[1:][-RECENT:]}
    before = max((end for end in ends if end <= branch), default=done)
    at = branch // grid * grid
    if at - before >= WORTH_A_PASS and not _inside_media(prompt, at):
        ends.add(at)
    last = stop // grid * grid
    if stop < total and last - max(ends, default=done) >= WORTH_A_PASS:
        ends |= set() if _inside_media(prompt, last) else {last}
    fresh = 2 * done < total  # a conversation that continues will probably continue again
    guesses = _guesses(prompt, max(done, at), ends, stop) if fresh else set()
    return tuple(sorted(ends | guesses))


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Image ends, and the message ends that save more than a pass costs, counted from the previous
    state. `done`: tokens with which the row resumes."""
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted(ends_of(prompt)):
        far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (far or end in images):
            cuts.append(end)
    return tuple(cuts)


def ends_of(prompt: Prompt) -> set[int]:
    return {span.end for span in prompt.spans} | {*prompt.snapshot_points}


def _guesses(prompt: Prompt, start: int, states: Iterable[int], stop: int) -> set[int]:
    """Positions before the end of the last message, last first, far from any other state."""
    end = min(stop, max(prompt.snapshot_points, default=stop))
    held, found = {start, *states}, set[int]()
    for part in GUESSED:
        at = (end - max(GRID, (end - start) // part)) // GRID * GRID
        before = max((state for state in held if state <= at), default=at)
        near = any(at <= state < at + WORTH_A_PASS for state in held)
        close = any(guess - at < WORTH_A_GUESS for guess in found)
        worth = at - before >= WORTH_A_GUESS and not near and not close
        if worth and not _inside_media(prompt, at):
            found.add(at)
    return found


def _inside_media(prompt: Prompt, at: int) -> bool:
    return any(span.start < at < span.end for span in prompt.spans)


MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""
NEAR = 16
"""This many tokens are cheaper to compute again than to store with a state."""


@dataclass(frozen=True)
class LivePath:
    row: RowParts
    cache: list[Any]
    given: Mapping[int, Snapshot]
    prompted: int
    spare: Mapping[int, Snapshot] = field(default_factory=dict)
    """Further snapshots, to end a path that is stored only partly."""
    buffers: RowBuffers | None = None

    @property
    def complete(self) -> bool:
        return self.row.complete

    @cached_property
    def states(self) -> Mapping[int, Snapshot]:
        """By token count, for paths with layers that cannot be cut."""
        last = take_snapshot(self.cache) if self.row.exact else None
        return {**self.given, **({} if last is None else {self.row.length: last})}


def grows_complete(found: Walk, source: LivePath) -> bool:
    return source.complete and all(node.complete for node, _ in found.steps)


def shared_path(found: Walk, length: int, *, complete: bool) -> list[Node]:
    """The stored nodes of the path. The last node is split where the path leaves it."""
    path = [node for node, _ in found.steps]
    agreed = found.steps[-1][1] if path else 0
    if path and agreed < len(path[-1].tokens) and not (complete and found.shared == length):
        path[-1] = split(path[-1], agreed)
    return path


def cut_back(path: Sequence[Node], kept: Fit, length: int) -> list[Node]:
    """The stored nodes that are kept, without the snapshots that are not kept. `length`: tokens of
    the whole path. A shorter head ends in a snapshot that is not a guess."""
    nodes = [node for node in path if node.start < kept.stop]
    if nodes and kept.stop < nodes[-1].stop and kept.stop < length:
        nodes[-1] = split(nodes[-1], kept.stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in kept.states:
            set_snapshot(node, None)
    if nodes and nodes[-1].guessed and kept.stop < length:
        nodes[-1].resumed = 1
    return nodes


def grow(
    parent: Node, ids: Ids, source: LivePath, kept: Fit, *, complete: bool, shared: int
) -> Node:
    """Add the missing part of the head below `parent`. Returns its last node."""
    every = {} if complete else source.states
    states = {at: every[at] for at in kept.states if at in every}
    spare = {at: source.spare[at] for at in kept.states - {*states} if at in source.spare}
    states |= {at: replace(state, inside=False) for at, state in spare.items()}
    cuts = _cuts(parent.stop, kept.stop, {source.prompted, *states})
    continued = int(2 * shared > len(ids))  # a conversation that continues may continue again
    for start, stop in pairwise(cuts):
        if source.buffers is not None:
            segment = source.row.within(source.buffers, start, stop)
        else:
            segment = source.row.cut(start, stop, complete=complete)
        parent = add(parent, ids[start:stop], segment, complete=complete)
        parent.hits, parent.generated = continued, start >= source.prompted
    for at, state in states.items():
        attach(parent, at, state)
    return parent


def refers(source: LivePath, path: Sequence[Node], length: int, *, complete: bool) -> bool:
    """Whether the whole path can refer to the row's buffers, so that no token is held twice. Its
    stored nodes must be copies of the row's own tokens alone, or refer to the buffers."""
    own = source.buffers
    if own is None or (complete and source.row.window):
        return False
    for node in path:
        segment = node.segment
        if not isinstance(segment, Segment) or node.stop > length:
            return False
        of_another = segment.held is not None and segment.held is not own
        if node.start < own.first:
            if segment.held is not own.base:
                return False
        elif of_another or segment.layers != source.row.shape:
            return False
    return True


def refer(source: LivePath, path: Sequence[Node]) -> None:
    own = source.buffers
    if own is None:
        return
    for node in path:
        if node.start >= own.first:
            set_segment(node, source.row.within(own, node.start, node.stop))


def _cuts(start: int, stop: int, wanted: set[int]) -> list[int]:
    if start >= stop:
        return []
    edges = set(range(-(-start // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE))
    return sorted({at for at in wanted | edges if start < at < stop} | {start, stop})


def attach(leaf: Node, at: int, state: Snapshot, *, wanted: bool = False) -> Node | None:
    """Attach a state at token `at` of the path. Returns its node, if that had no state. `wanted`: a
    row would have resumed there."""
    node = next((node for node in leaf.path() if node.start < at <= node.stop), None)
    if node is None or node.complete:
        return None
    if at < node.stop:
        node = split(node, at - node.start)
    if node.snapshot is not None:
        return None
    set_snapshot(node, state)
    node.resumed = int(wanted)
    return node


def prune(leaf: Node) -> None:
    """Keep at most `1 + RECENT + INSIDE` snapshots of a path: the ends of the first and the last
    messages; inside messages the most resumed, then the last ones."""
    holders = [node for node in leaf.path() if node.snapshot is not None]
    ends = _spaced([node for node in holders if not _inside(node)])
    kept = {*ends[:1], *ends[1:][-RECENT:]}
    others = sorted(filter(_inside, holders), key=lambda node: (node.resumed, node.stop))
    kept |= {*others[-INSIDE:]}
    for node in holders:
        if node not in kept:
            set_snapshot(node, None)


def _spaced(holders: list[Node]) -> list[Node]:
    """Remove snapshots that save almost nothing, except the last. The snapshot at the end of the
    prompt is one, right after that of the last message, once the path continues."""
    spaced = holders[:1]
    for node in holders[1:]:
        if node.stop - spaced[-1].stop >= NEAR or node is holders[-1]:
            spaced.append(node)
    return spaced


def _inside(holder: Node) -> bool:
    return holder.snapshot is not None and holder.snapshot.inside
