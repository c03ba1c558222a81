"""Makes a row an entry, and an entry a row, without a copy: nodes refer to the buffers of rows.

MLX updates a row's layers in place only while nothing else refers to their arrays. So a segment
refers to the layers, and cuts views out of them only while they are read. When a second row
branches off within a row's tokens, these are copied once, into a `Prefix`.

A row gets its buffers in `Reuse.fill_in_place`, `lease_row` or `fork`. `RowBuffers.divide_at` moves
its first tokens into a prefix. See `handover` for the states of buffers and for their end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Self

import mlx.core as mx

from ...isolation import Fault, attempt
from ...upstream.cache_classes import layers_of
from ...upstream.shared_kv import Prefix, divide, undivide
from ...upstream.shared_kv import start as begin_with
from ..row_cache import append_layers, extend, kv_arrays, own_arrays, set_arrays
from ..scheduling.ledger import STEP_TOKENS, whole_steps
from .handover import Totals
from .tree import Match, Node, segment_of, split

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RowBuffers:
    """Keys and values of tokens `[base_tokens, capacity)` of a row, or of a prefix of rows."""

    layers: dict[int, Any]
    """The layers of the row cache that keep every token, or `Prefix`es, by layer index."""
    base_tokens: int = 0
    base: RowBuffers | None = None  # the prefix with tokens `[0, base_tokens)`, if there is one
    nodes: set[Node] = field(default_factory=set)  # on one path, with tokens in these buffers
    stored: int = 0
    """Bytes of the nodes and of the tokens before them, which are not charged to the row."""
    intact: bool = True
    """Whether no row runs in these buffers, and no pass that wrote to them has failed."""
    tails: weakref.WeakSet[RowBuffers] = field(default_factory=weakref.WeakSet)
    """The buffers of rows that continue this prefix."""
    _users: tuple[weakref.ref[Lease], ...] = ()
    _prefixes: dict[int, weakref.WeakValueDictionary[int, Prefix]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base is not None:
            self.base.tails.add(self)

    @property
    def is_prefix(self) -> bool:
        return any(isinstance(layer, Prefix) for layer in self.layers.values())

    @property
    def own_arrays(self) -> list[Any]:
        """Those of all layers, without the arrays of the prefix."""
        return [a for layer in self.layers.values() for a in own_arrays(layer)]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers. Read it only once the row has a token."""
        return sum(a.nbytes // max(1, a.shape[-2]) for a in self.own_arrays)

    @property
    def capacity(self) -> int:
        """Tokens that fit, including those of its prefix."""
        return self.base_tokens + max(int(a.shape[-2]) for a in self.own_arrays)

    @property
    def users(self) -> list[Lease]:
        """The leases on these buffers that still exist."""
        users = (ref() for ref in self._users)
        return [user for user in users if user is not None and self in user.buffers]

    @property
    def in_use(self) -> bool:
        """Any thread may ask."""
        return bool(self.users)

    @property
    def is_pinned(self) -> bool:
        """Whether evicting its nodes frees nothing: a row uses it, or entries continue it."""
        return self.in_use or any(tail.stored for tail in self.tails)

    @property
    def lost(self) -> bool:
        """Whether a pass of its row has failed, so that its arrays may be corrupted."""
        return not self.intact and not self.in_use

    @property
    def path(self) -> list[Node]:
        """Its nodes in the order of their tokens."""
        return sorted(self.nodes, key=lambda node: node.start)

    def views(self, layer_index: int, start: int, stop: int) -> list[Any]:
        """Views of tokens `[start, stop)` of a layer. Drop them before the row's next pass."""
        layer = self.layers[layer_index]
        found = own_arrays(layer) if isinstance(layer, Prefix) else kv_arrays(layer)
        return [array[..., start:stop, :] for array in found]

    def prefix_of_length(self, length: int) -> Mapping[int, Prefix]:
        """The first tokens of this prefix, by layer index. Returns the same objects while a row has
        them: rows with the same objects attend to them in one product."""
        known = self._prefixes.setdefault(length, weakref.WeakValueDictionary())
        found = {i: known.get(i) or layer.first_tokens(length) for i, layer in self.layers.items()}
        known.update(found)
        return found

    def add_user(self, lease: Lease) -> None:
        self._users = (*(ref for ref in self._users if ref() is not None), weakref.ref(lease))

    def spare(self, length: int) -> int:
        """Bytes of capacity after the first `length` tokens."""
        return self.token_bytes * max(0, self.capacity - length)

    def trim(self, length: int) -> None:
        """Free the capacity after the first `length` tokens, layer by layer. Logs a failure."""
        if fault := attempt(partial(self._trim, length)):  # a pass of the row may have failed
            log.warning("a row keeps its capacity: %s", fault.summary)

    def _trim(self, length: int) -> None:
        for layer in self.layers.values():
            cut = [mx.contiguous(a[..., : length - self.base_tokens, :]) for a in own_arrays(layer)]
            mx.eval(cut)
            set_arrays(layer, cut)
            if not isinstance(layer, Prefix):
                layer.offset = min(layer.offset, length)

    def move_to(self, cache: Sequence[Any], length: int) -> None:
        """Hand tokens `[0, length)` over to a fresh row cache, whose layers become its layers."""
        fresh_layers = layers_of(cache)
        for i, layer in self.layers.items():
            fresh = fresh_layers[i]
            fresh.__class__ = layer.__class__
            vars(fresh).update(vars(layer))
            vars(layer).clear()
            fresh.offset = length
            self.layers[i] = fresh

    def grow(self, length: int, room: int, spare_tokens: int) -> None:
        """Make capacity for `room` tokens after the first `length`. If it has to grow, it gets room
        for as many tokens again, at most `spare_tokens`, for later turns. Copies layer by layer."""
        used = length - self.base_tokens
        if all(a.shape[-2] >= used + room for a in self.own_arrays):
            return
        capacity = whole_steps(used + room + min(used, spare_tokens))
        for layer in self.layers.values():
            grown = [extend(a[..., :used, :], capacity - used) for a in own_arrays(layer)]
            mx.eval(grown)
            set_arrays(layer, grown)

    def divide_at(self, at: int) -> RowBuffers:
        """Move tokens `[0, at)` into a prefix for several rows, and return it. The lease of the row
        that runs in these buffers gets it, too. Copies each layer once."""
        mx.eval(self.own_arrays)  # or raise before a change
        room = self.capacity - at
        layers = {i: divide(layer, at, room) for i, layer in self.layers.items()}
        prefix = RowBuffers(layers)
        self.base_tokens, self.base = at, prefix
        prefix.tails.add(self)
        for user in self.users:
            if user.row is self:
                user.base, user.base_tokens, user.capacity = prefix, at, self.capacity
                prefix.add_user(user)
        return prefix


@dataclass(eq=False)
class Lease:
    """What a row uses of the prefix cache, which then stays: its buffers, and a prefix. Buffers
    refer to a lease weakly, and a `Fault` keeps no frames: a lease ends once no row has it."""

    row: RowBuffers | None = None
    """The row's buffers. `None` if no entry can refer to them, or the row was merged."""
    base: RowBuffers | None = None
    base_tokens: int = 0
    capacity: int = 0
    """Tokens that fit. 0: unknown, as the row did not begin with buffers of an entry or prefix."""

    @property
    def base_bytes(self) -> int:
        """Bytes of the tokens in the prefix."""
        return 0 if self.base is None else self.base_tokens * self.base.token_bytes

    def acquire(self) -> Self:
        """Mark the buffers as in use, and the row's own ones as not intact. Returns the lease."""
        for buffers in self.buffers:
            buffers.add_user(self)
        if self.row is not None:
            self.row.intact = False
        return self

    def row_of(self, cache: Sequence[Any]) -> RowBuffers | None:
        """`row`, or `None` if `cache` has other buffers, because the row was merged."""
        expected, found = {} if self.row is None else self.row.layers, layers_of(cache)
        return self.row if all(found[i] is layer for i, layer in expected.items()) else None

    @property
    def buffers(self) -> tuple[RowBuffers, ...]:
        return tuple(x for x in (self.base, self.row) if x is not None)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the row's KV that the prefix cache counts, so that the row is not charged."""
        row = 0 if self.row is None else self.row.stored
        if self.base is None:
            return row
        if not self.base.nodes:  # it is not stored: each of its rows is charged for a part
            return row + self.base_bytes - self.base_bytes // max(1, len(self.base.users))
        return row + min(self.base.stored, self.base_bytes)

    def trim(self, tokens: int) -> None:
        """Free the row's capacity after this many tokens, except that of tokens which it has."""
        if self.row is not None:
            self.row.trim(max(tokens, *(layer.offset for layer in self.row.layers.values())))
            self.capacity = self.row.capacity

    def extra_bytes(self, tokens: int) -> int:
        """How much more a row of this capacity takes because the tokens after its common prefix are
        rounded up to whole steps separately. May be negative."""
        whole = self.base_tokens + whole_steps(tokens - self.base_tokens)
        token_bytes = 0 if self.base is None else self.base.token_bytes
        return (whole - whole_steps(tokens)) * token_bytes


@dataclass(eq=False)
class Claim(Lease):
    """The lease of a queued prompt's row, which has no buffers yet, on what it will not copy. The
    row will divide `base`, unless that is a prefix already."""

    taken: RowBuffers | None = None  # buffers that the row will take over, with their prefix
    nbytes: int = 0  # of what it will not copy

    @property
    def buffers(self) -> tuple[RowBuffers, ...]:
        return tuple(x for x in (self.base, self.taken) if x is not None)

    @property
    def stored_bytes(self) -> int:
        return self.nbytes


@dataclass(eq=False)
class Reuse:
    """Lets a row take over the buffers of an entry, or share their first tokens. Engine thread."""

    _totals: Totals
    _in_place: bool  # else rows only copy
    _min_shared: float  # fewest tokens to share: infinite if the layers are not divisible

    def claim(self, match: Match, rows: int) -> Claim:
        """What the first of a prompt's `rows` can have without a copy; an empty claim: nothing. The
        other rows share its prefix, or, if it has none, all its tokens (`fork`). So a prefix is
        refused if the tokens after it, as each row has its own, are more than the whole prompt."""
        path, length = match.path, match.length
        possible = (_take_over(path, length), self._share(path, length))
        for found in filter(None, possible if self._in_place else ()):
            base = found.base_tokens
            if not base or rows * (match.total - base) <= match.total:
                return found
        return Claim()

    def fill_in_place(
        self, match: Match, rows: int, cache: list[Any], room: int, spare: int
    ) -> tuple[Lease | None, int]:
        """Give a fresh row cache what it need not copy (see `claim`). Returns the row's lease, and
        the number of its tokens in place. `room`: tokens of capacity after the match. `spare`: most
        bytes of capacity for later turns."""
        claim = self.claim(match, rows)
        if (row := claim.taken) is not None:
            _copy_out(row, match)
            row.move_to(cache, match.length)
            self._totals.set_spare(row, 0)
            lease = Lease(row, row.base, row.base_tokens).acquire()
            row.grow(match.length, room, spare // max(1, row.token_bytes))
            lease.capacity = row.capacity
            return lease, match.length
        base, at = claim.base, claim.base_tokens
        if base is not None and not base.is_prefix:
            base = self._divide(base, at, match.path)
        if base is None:
            return self.lease_row(cache), 0
        layers = append_layers(cache)
        for i, prefix in base.prefix_of_length(at).items():
            begin_with(layers[i], prefix)
        capacity = at + whole_steps(match.length + room - at)
        return Lease(RowBuffers(layers, at, base), base, at, capacity=capacity).acquire(), at

    def lease_row(self, cache: list[Any]) -> Lease | None:
        """The lease of a row that has copied all its tokens. `None`: rows only copy."""
        layers = append_layers(cache)
        return Lease(RowBuffers(layers) if layers else None).acquire() if self._in_place else None

    def fork(
        self, lease: Lease | None, cache: list[Any], capacity: int
    ) -> tuple[list[Any], Lease | None]:
        """A copy of the cache of a row whose prompt is complete, with this capacity, and its lease.
        If the row has no prefix, both share all tokens but the last, if these are enough."""
        row = None if lease is None else lease.row_of(cache)
        if row is not None and row.base is None:
            length = _tokens_of(row)
            if length > self._min_shared:
                self._divide(row, length - 1, row.path)
        copied = deepcopy(cache)
        if row is None:
            return copied, lease and Lease(None, lease.base, lease.base_tokens).acquire()
        other = RowBuffers(append_layers(copied), row.base_tokens, row.base)
        other.trim(capacity)
        return copied, Lease(other, row.base, row.base_tokens, capacity=other.capacity).acquire()

    def _share(self, path: Sequence[Node], length: int) -> Claim | None:
        """A claim on the first tokens of a match. `None`: none can be shared, or too few."""
        row = path[0].row if path else None
        if row is None or row.base_tokens:
            return None
        shared = [*takewhile(lambda node: node.row is row, path)]
        end, more = min(shared[-1].stop, length), 0
        if not row.is_prefix:
            tokens, more = _tokens_of(row), STEP_TOKENS  # it may take one more step once divided
            end = min(end, tokens - 1)  # one token at least stays the row's own
            if 2 * end < tokens:
                return None  # too few for the copy
        if end < self._min_shared:
            return None
        return Claim(base=row, base_tokens=end, nbytes=(end - more) * row.token_bytes)

    def _divide(self, row: RowBuffers, at: int, path: Sequence[Node]) -> RowBuffers | None:
        """`RowBuffers.divide_at`, also for the nodes of `path`. `None` if the device failed."""
        prefix = attempt(partial(row.divide_at, at))
        if isinstance(prefix, Fault):  # a failed pass of that row must not fail this one
            for layer in row.layers.values():  # the layers of a row have the same prefix
                undivide(layer)
            log.warning("a prefix in use is not shared: %s", prefix.summary)
            return None
        for node in [n for n in path if n.start < at]:
            upper = split(node, at - node.start) if node.stop > at else node
            upper.set_payload(replace(segment_of(upper), row=prefix), upper.snapshot)
        return prefix


def _tokens_of(row: RowBuffers) -> int:
    """Tokens that the row has, with those of its prefix."""
    return min(int(layer.offset) for layer in row.layers.values())


def _take_over(path: Sequence[Node], length: int) -> Claim | None:
    """A claim on the buffers in which a match ends. `None` if a row uses them, if they are lost or
    lack a part of the match, or if more of their tokens are after the match than in it."""
    row = path[-1].row if path else None
    if row is None or row.is_prefix or row.is_pinned or not row.intact:
        return None
    start, stop = row.path[0].start, row.path[-1].stop
    has_all = all(node.row is row for node in path if node.start >= start)
    if not has_all or stop - length > length - row.base_tokens:
        return None
    capacity = stop if stop > length else 0  # the rest is copied out, but the buffers stay as large
    return Claim(None, row.base, row.base_tokens, capacity, row, length * row.token_bytes)


def _copy_out(row: RowBuffers, match: Match) -> None:
    """Let the nodes after a match have arrays of their own, as the row will overwrite them."""
    last, nodes = match.path[-1], row.path
    if match.length < last.stop:
        split(last, match.length - last.start)  # `last` is now the part after the match
    for node in [node for node in nodes if node.start >= match.length]:
        node.set_payload(segment_of(node).copy(), node.snapshot)
