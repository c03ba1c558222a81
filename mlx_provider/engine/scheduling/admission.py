"""Which prompt runs next, as accounts share the device by tokens, and which rows fit into memory.
Imports no mlx.

Each account has a count of the tokens that it was served, as in VTC (Sheng et al., OSDI 2024). An
account without requests is forgotten, and starts again at the smallest count. Prompts run in the
order of the counts at which they would end. So a short prompt precedes a long one, and however many
prompts another account has, at most as many tokens of them run before a prompt as that has itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import BadRequest, Overloaded
from ..request import PrefillJob, Request, Row
from ..sizes import kv_capacity, kv_growth, whole_steps

OUTPUT_TOKEN = 2.0
"""A token of a reply counts as this many of a prompt, as in VTC."""
OTHER_ACCOUNTS = 0.25
"""Places in the queue for accounts without a request in it, as a share of the others."""


class FairShares:
    """The tokens that each account was served, divided by its share."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    @property
    def several(self) -> bool:
        return len(self._served) > 1

    def join(self, request: Request, present: Iterable[Request]) -> None:
        served = {each.account: self._served.get(each.account, 0.0) for each in present}
        served.setdefault(request.account, min(served.values(), default=0.0))
        self._served = served

    def charge(self, request: Request, tokens: float) -> None:
        account = request.account
        self._served[account] = self._served.get(account, 0.0) + tokens / request.share

    def order(self, jobs: Sequence[PrefillJob]) -> Sequence[PrefillJob]:
        """Prompts in the order in which they run. Those of one account keep their order."""
        if not self.several:
            return jobs
        ends = dict(self._served)
        tags: dict[PrefillJob, float] = {}
        for job in jobs:
            account = job.request.account
            ends[account] = ends.get(account, 0.0) + job.work / job.request.share
            tags[job] = ends[account]
        return sorted(jobs, key=tags.__getitem__)


def above_share(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that give way to an account without rows, one after the other: the youngest of the
    account with the most rows. Each account keeps one."""
    left = sorted(rows, key=lambda row: (row.request.arrived, row.index))
    held = Counter(row.request.account for row in left)
    while held:
        account, count = held.most_common(1)[0]
        if count < 2:
            return
        at = max(at for at, row in enumerate(left) if row.request.account == account)
        held[account] -= 1
        yield left.pop(at)


@dataclass(frozen=True)
class Limits:
    max_rows: int
    max_queue: int
    stall_target: float
    """Seconds that a token of decoding rows may take on average beside a prompt."""
    max_chunk: int
    output_reserve: int


@dataclass(frozen=True)
class Budget:
    """The bytes that a request needs, and the bytes that are available."""

    row_bytes: Callable[[int], int]
    """Cache bytes of one row with this many tokens."""
    available: Callable[[], int]
    """Bytes for all live rows: those that weights and the rows of other engines leave. Read-only,
    as are all fields but `reclaim`."""
    reclaim: Callable[[int], None]
    """Unload idle models and shrink the prefix cache, so that live rows may use this many bytes."""
    alone: Callable[[], int]
    """Bytes for live rows if no other model were loaded."""
    others_go_on: Callable[[], bool] = lambda: False
    """Whether other engines hold memory that they will free without any action of this one."""
    image_bytes: Callable[[], int] = lambda: 0
    """Bytes that requests use for a while besides their rows: images before they reach the
    model."""
    passing: Callable[[int, int], int] = lambda tokens, rows: 0
    """Bytes of a running pass of this many prompt tokens and rows."""
    unloadable: Callable[[int], int] = lambda need: 0
    """Bytes of idle models that `reclaim` would unload for this many bytes of live rows."""
    fork_bytes: Callable[[int, int], int] = lambda tokens, rows: 0
    """Bytes that this many rows of a prompt of so many tokens take less because they share it."""


class Admission:
    """Bytes to reserve for rows. Every method is read-only, so any thread may call it."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self.limits = limits
        self.budget = budget

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
        need, limit = self.reservation(request.rows), self.budget.alone()
        need -= self.budget.fork_bytes(len(request.prompt.tokens), len(request.rows))
        if need > limit:
            raise BadRequest(
                f"the prompt ({len(request.prompt.tokens)} tokens) needs {need} bytes of cache; "
                f"the memory limit leaves {max(0, limit)} beside the model alone: shorten it, or "
                "raise MLX_PROVIDER_MEMORY_LIMIT"
            )

    def reservation(self, rows: Iterable[Row]) -> int:
        """Bytes to reserve for rows: their caches, an output reserve, and their passes. What they
        use of the prefix cache is counted there, once for all rows."""
        rows = list(rows)
        if not rows:
            return 0
        held = sum(map(self._own_bytes, rows))
        return held + self.budget.passing(max(map(self._tokens_to_run, rows)), len(rows))

    def may_wait(self, row: Row, active_rows: int) -> bool:
        """Whether a row that has outgrown the memory can continue later."""
        whole = self.budget.row_bytes(self._own_capacity(row))  # also what others hold now
        if whole + self.budget.passing(self._tokens_to_run(row), 1) > self.budget.alone():
            return False
        return active_rows > 1 or self.budget.others_go_on()

    def kv_capacity(self, job: PrefillJob) -> int:
        """Token capacity for the caches of the prompt's rows."""
        return max(map(self._own_capacity, job.rows))

    def kv_growth(self, job: PrefillJob) -> int:
        return kv_growth(*self._first_capacity(job.request))

    def spare(self, row: Row) -> int:
        """Bytes of the capacity that a row has only for later turns of its conversation."""
        if row.lease is None or row.lease.capacity <= self.kv_needed(row):
            return 0
        reserved = self._bytes(row, self._tokens_reserved(row))
        return max(0, reserved - self._bytes(row, self.kv_needed(row)))

    def kv_needed(self, row: Row) -> int:
        """Token capacity of a row without that."""
        return whole_steps(kv_capacity(*self._first_capacity(row.request), row.held + 1))

    def outgrown(self, row: Row) -> bool:
        """Whether a row needs more memory than its reservation at admission."""
        return len(row.tokens) >= self.limits.output_reserve

    def exceeds(self, row: Row) -> bool:
        """The same, also because of a longer row in the same cache."""
        longer = row.merged and row.merged > self._first_capacity(row.request)[0]
        return self.outgrown(row) or bool(longer)

    def _own_bytes(self, row: Row) -> int:
        stored = 0 if row.lease is None else row.lease.stored
        return max(0, self._bytes(row, self._tokens_reserved(row)) - stored)

    def _bytes(self, row: Row, tokens: int) -> int:
        """Cache bytes of a row of this capacity, also of what it uses of the prefix cache."""
        whole = self.budget.row_bytes(tokens)
        return whole if row.lease is None else whole + row.lease.beyond(tokens)

    def _tokens_to_run(self, row: Row) -> int:
        """Tokens of a row that are prefilled, or may have to be prefilled again."""
        whole = row.held if self.outgrown(row) else len(row.request.prompt.tokens)
        return min(row.held, whole)

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
