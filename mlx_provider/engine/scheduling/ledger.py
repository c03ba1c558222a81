"""Counts memory: bytes that rows of an engine take, and those available to them. Imports no mlx."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...errors import BadRequest, Overloaded
from ..request import PrefillJob, Request, Row
from ..sizes import kv_capacity, kv_growth, whole_steps

if TYPE_CHECKING:
    from ..prefix_cache.buffers import Lease

OTHER_ACCOUNTS = 0.25
"""Places in the queue for accounts without a request in it, as a share of the others."""

Claims = Mapping[Row, "Lease | None"]
NO_CLAIMS: Claims = MappingProxyType({})


@dataclass(frozen=True)
class Limits:
    max_rows: int
    max_queue: int
    stall_target: float
    """Seconds that a token of decoding rows may take on average beside a prompt."""
    max_chunk: int
    output_reserve: int


class Ledger(ABC):
    """Any thread may call it, except for `reclaim`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    # -- the memory of the process

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Cache bytes of one row with this many tokens."""

    @abstractmethod
    def available(self) -> int:
        """Bytes for all live rows: those that weights and the rows of other engines leave."""

    @abstractmethod
    def alone(self) -> int:
        """Bytes for live rows if no other model were loaded."""

    def pass_bytes(self, tokens: int, rows: int) -> int:
        """Bytes of a running pass of this many prompt tokens and rows."""
        return 0

    def image_bytes(self) -> int:
        """Bytes of images that requests hold, besides their rows, until these reach the model."""
        return 0

    def others_go_on(self) -> bool:
        """Whether other engines hold memory that they will free without any action of this one."""
        return False

    def unloadable(self, need: int, pinned: int) -> int:
        """Bytes of idle models that `reclaim` would unload for this many bytes of live rows, if
        `pinned` more bytes of the prefix cache could not be evicted."""
        return 0

    @abstractmethod
    def reclaim(self, need: int) -> None:
        """Unload idle models and shrink the prefix cache, so that live rows may use this many
        bytes (engine thread)."""

    # -- rows

    def check(self, request: Request, queued: int, *, first: bool = False) -> None:
        """Check whether a request may queue behind `queued` others. `first`: none of these is of
        its account, for which the queue has more places. Raises `Overloaded` if the queue is full,
        and `BadRequest` if the request can never fit."""
        if not 0 < len(request.rows) <= self.limits.max_rows:
            raise BadRequest(
                f"n={len(request.rows)} is not within 1 .. {self.limits.max_rows} rows", param="n"
            )
        if queued >= self.limits.max_queue * (1 + OTHER_ACCOUNTS * first):
            raise Overloaded(f"{queued} requests are waiting, the limit; try again later")
        need, limit = self.reservation(request.rows), self.alone()
        if need > limit:
            raise BadRequest(
                f"the prompt ({len(request.prompt.tokens)} tokens) needs {need} bytes of cache; "
                f"the memory limit leaves {max(0, limit)} beside the model alone: shorten it, or "
                "raise MLX_PROVIDER_MEMORY_LIMIT"
            )

    def reservation(self, rows: Iterable[Row], claims: Claims = NO_CLAIMS) -> int:
        """Bytes to reserve for rows: their caches, an output reserve, and their passes. What they
        use of the prefix cache is counted there, once for all rows. `claims`: what rows of a queued
        prompt will use."""
        rows = list(rows)
        if not rows:
            return 0
        held = sum(self._own_bytes(row, claims.get(row, row.lease)) for row in rows)
        return held + self.pass_bytes(max(map(self._tokens_to_run, rows)), len(rows))

    def may_wait(self, row: Row, active_rows: int) -> bool:
        """Whether a row that has outgrown the memory can continue later."""
        full = self.row_bytes(self._own_capacity(row))  # a shared prefix included
        if full + self.pass_bytes(self._tokens_to_run(row), 1) > self.alone():
            return False
        return active_rows > 1 or self.others_go_on()

    def kv_capacity(self, job: PrefillJob) -> int:
        """Token capacity for the caches of the prompt's rows."""
        return max(map(self._own_capacity, job.rows))

    def kv_growth(self, job: PrefillJob) -> int:
        return kv_growth(*self._first_capacity(job.request))

    def spare(self, row: Row) -> int:
        """Bytes of the capacity that a row has only for later turns of its conversation."""
        if row.lease is None or row.lease.capacity <= self.kv_needed(row):
            return 0
        reserved = self._bytes(row.lease, self._tokens_reserved(row))
        return max(0, reserved - self._bytes(row.lease, self.kv_needed(row)))

    def kv_needed(self, row: Row) -> int:
        """Token capacity of a row without room for later turns."""
        return whole_steps(kv_capacity(*self._first_capacity(row.request), row.held + 1))

    def outgrown(self, row: Row) -> bool:
        """Whether a row needs more memory than its reservation at admission."""
        return len(row.tokens) >= self.limits.output_reserve

    def exceeds(self, row: Row) -> bool:
        """The same as `outgrown`, or because of a longer row in the same cache."""
        longer = row.merged and row.merged > self._first_capacity(row.request)[0]
        return self.outgrown(row) or bool(longer)

    def _own_bytes(self, row: Row, lease: Lease | None) -> int:
        stored = 0 if lease is None else lease.stored
        return max(0, self._bytes(lease, self._tokens_reserved(row)) - stored)

    def _bytes(self, lease: Lease | None, tokens: int) -> int:
        """Cache bytes of a row of this capacity, also of what it uses of the prefix cache."""
        whole = self.row_bytes(tokens)
        return whole if lease is None else whole + lease.beyond(tokens)

    def _tokens_to_run(self, row: Row) -> int:
        """Tokens of a row that are prefilled, or may have to be prefilled again."""
        held = row.held
        return held if self.outgrown(row) else min(held, len(row.request.prompt.tokens))

    def _tokens_reserved(self, row: Row) -> int:
        return max(self._own_capacity(row), row.merged)

    def _own_capacity(self, row: Row) -> int:
        """Token capacity of a row in a cache of its own."""
        first, longest = self._first_capacity(row.request)
        held = 0 if row.lease is None else row.lease.capacity
        return kv_capacity(first, longest, row.held + 1, held)

    def _first_capacity(self, request: Request) -> tuple[int, int]:
        """The first capacity of its rows in tokens, and their largest length."""
        prompt, most = len(request.prompt.tokens) - request.skipped, request.max_tokens
        return prompt + min(most, self.limits.output_reserve), prompt + most
