"""An LRU cache of models with leases, and one queue of the requests that wait for memory.

A request has a lease from before its prompt is rendered until its last event. The least recently
used idle model (without leases) leaves if another model, or rows of another, need its memory. Other
requests wait, oldest first, for a limited time. After `TURN` seconds, the first one reserves
models: these accept no new requests, so that one becomes idle.

No request waits forever: a lease states the bytes of its request's rows before an engine queues the
request, and weights never take the memory for the largest of them. So one such request can always
run, and requests that wait here hold nothing. Models load and leave in a separate thread, so that a
cancelled request delays no other."""

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ..errors import (
    EngineDied,
    LoadFailed,
    MLXProviderError,
    RequestFailed,
    RequestTimedOut,
    for_another,
)
from .residents import Lease, MemoryLedger, Resident
from .weights import Weights

log = logging.getLogger(__name__)

TURN = 3.0
"""Seconds in the queue after which the first request reserves models that must leave."""
REST = 10.0
"""Seconds without use after which an idle model leaves so that more rows of others run at once."""


@dataclass(frozen=True)
class LoadPlan:
    name: str
    nbytes: int  # of the weights, as expected
    load: Callable[[], Weights]  # blocks; raises errors of `mlx_provider.errors`


@dataclass(eq=False)
class _Waiter:
    who: str
    key: Hashable
    plan: LoadPlan
    rows: int  # bytes
    keep_alive: float | None
    since: float
    until: float
    deadline: float
    """Monotonic seconds: arrival, end of the longest wait here, end of the request's time limit."""
    lease: Lease | None = None
    error: MLXProviderError | None = None
    reserved: frozenset[Hashable] = frozenset()
    """Models that accept no new requests until they become idle and leave."""


@dataclass(eq=False)
class LoadQueue:
    """Safe from any thread. The ledger's lock covers everything; it is not held during a load."""

    _ledger: MemoryLedger
    _unload: Callable[[Weights], None]  # blocks
    patience: float  # most seconds in the queue
    turn: float = TURN
    waiting: list[_Waiter] = field(default_factory=list)  # oldest first
    reserved: frozenset[Hashable] = frozenset()  # what the first waiter has reserved
    _starved: set[Hashable] = field(default_factory=set)
    """Models whose rows cannot continue while the weights of others are in memory."""
    _loading: Hashable | None = None
    """The model that loads, or for whose rows others leave: one at a time."""
    _expiry: threading.Timer | None = None
    _closed: MLXProviderError | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._ledger.lock)

    def acquire(
        self,
        key: Hashable,
        plan: Callable[[], LoadPlan],
        *,
        who: str = "",
        rows: int = 0,
        keep_alive: float | None = None,
        since: float | None = None,
        deadline: float = inf,
    ) -> Lease:
        """A lease on the model `key`, loaded if necessary, with `rows` bytes free beside all
        weights. Blocks. `who`: the request's id, for `withdraw`. `keep_alive`: see
        `Resident.extend`. `since`: arrival, which sets the place in the queue. Raises the errors of
        `plan` and of the load, `LoadFailed` for a model that never fits, `MemoryInUse` after
        `patience`, `RequestTimedOut` at `deadline`, `RequestFailed` after `withdraw`."""
        with self._changed:
            if self._closed is not None:
                raise for_another(self._closed)
            if (lease := self._lease(key, rows, keep_alive)) is not None:
                return lease
        load_plan = plan()
        if load_plan.nbytes > self._ledger.limit:
            raise self._ledger.too_large_error(load_plan.name, load_plan.nbytes)
        now = time.monotonic()
        arrival, until = now if since is None else since, now + self.patience
        waiter = _Waiter(who, key, load_plan, rows, keep_alive, arrival, until, deadline)
        with self._changed:
            insort(self.waiting, waiter, key=lambda other: other.since)
            try:
                self._serve()
                return self._wait(waiter)
            except BaseException:  # Ctrl-C, too
                if waiter.lease is not None:
                    waiter.lease.release()
                raise
            finally:
                if waiter in self.waiting:
                    self.waiting.remove(waiter)
                    self._serve()

    def withdraw(self, who: str) -> None:
        """End the wait of a request with `RequestFailed`."""
        with self._changed:
            self._refuse(RequestFailed.cancellation(), [w for w in self.waiting if w.who == who])
            self._serve()

    def make_way(
        self,
        key: Hashable,
        rows: int,
        others: int,
        unload: Callable[[Weights], None],
        *,
        stuck: bool,
    ) -> None:
        """Unload idle models in this thread, so that rows of the model `key` have `rows` bytes, and
        those of other models `others` bytes. `stuck`: no row of `key` will free memory at its end.
        A model that was used in the last `REST` seconds leaves only if `stuck` and `rows` exceeds
        the free bytes. If `stuck` and no idle model helps, the others accept no new requests."""
        with self._changed:
            idle = self._to_unload(key, rows, others, stuck)
            leaving = _detach(idle or ())
            if idle is None and stuck:
                self._starved.add(key)
            elif key in self._starved:
                self._starved.remove(key)
                self._serve()
        self._leave(leaving, unload)

    def unloadable(self, key: Hashable, rows: int, others: int, *, stuck: bool) -> int:
        """Bytes of the models that `make_way` would unload."""
        with self._changed:
            return sum(r.nbytes for r in self._to_unload(key, rows, others, stuck) or ())

    def _to_unload(
        self, key: Hashable, rows: int, others: int, stuck: bool
    ) -> list[Resident] | None:
        free = self._ledger.free
        never = stuck and rows > free  # unless a model leaves
        before = inf if never else time.monotonic() - REST
        return self._idle(rows + others - free, key, before)

    def others_go_on(self, key: Hashable) -> bool:
        """Whether requests of other models will end without memory of `key`."""
        with self._changed:
            going = (resident.key for resident in self._ledger if resident.leases)
            return any(other != key and other not in self._starved for other in going)

    def models(self) -> list[Weights]:
        """The models in memory, without those that load or unload."""
        return [model for resident in self._ledger if (model := resident.usable) is not None]

    def close(self, error: MLXProviderError) -> None:
        """Raise `error` for all requests that wait, and for each later one."""
        with self._changed:
            self._closed = error
            self._serve()
            if self._expiry is not None:
                self._expiry.cancel()

    # -- the queue (under the lock)

    def _lease(self, key: Hashable, rows: int, keep_alive: float | None) -> Lease | None:
        resident = self._ledger.get(key)
        if resident is None or (model := resident.usable) is None or rows > self._ledger.free:
            return None
        if key in self.reserved or self._others_starve(key):
            return None
        lease = Lease(model, key, rows, self._ledger, self._release)
        resident.extend(keep_alive)
        resident.leases.add(lease)
        resident.last_used = time.monotonic()
        return lease

    def _release(self, lease: Lease) -> None:
        with self._changed:
            resident = self._ledger.get(lease.key)
            if resident is None or lease not in resident.leases:
                return
            resident.leases.remove(lease)
            resident.last_used = time.monotonic()
            if not resident.leases:
                self._starved.discard(lease.key)
                self._await_expiry()
            self._serve()

    def _others_starve(self, key: Hashable) -> bool:
        return bool(self._starved) and key not in self._starved

    def _wait(self, waiter: _Waiter) -> Lease:
        while waiter.lease is None:
            if waiter.error is not None:
                raise for_another(waiter.error)
            now = time.monotonic()
            if now >= waiter.deadline:
                raise RequestTimedOut("the request's time limit has passed")
            if now >= waiter.until and self._loading != waiter.key:
                raise self._ledger.in_use_error(waiter.key, waiter.plan.name, waiter.plan.nbytes)
            times = (waiter.deadline, waiter.until, waiter.since + self.turn)
            soonest = min((at for at in times if at > now), default=inf)
            self._changed.wait(None if soonest == inf else soonest - now)
            if self.waiting and self.waiting[0] is waiter:
                self._serve()
        return waiter.lease

    def _serve(self) -> None:
        """Give a lease to each waiter that can have one now, and make room for the first other."""
        first: _Waiter | None = None
        self.reserved = frozenset()
        if self._closed is not None:
            self._refuse(self._closed, self.waiting)
        for waiter in tuple(self.waiting):
            waiter.lease = self._lease(waiter.key, waiter.rows, waiter.keep_alive)
            if waiter.lease is not None:
                self.waiting.remove(waiter)
                self._changed.notify_all()
            elif first is None:
                first = waiter
                self.reserved = waiter.reserved = self._to_reserve(waiter)
        if first is not None and self._loading is None:
            self._make_room(first)

    def _refuse(self, error: MLXProviderError, waiters: Iterable[_Waiter]) -> None:
        for waiter in tuple(waiters):
            waiter.error = error
            self.waiting.remove(waiter)
        self._changed.notify_all()

    def _to_reserve(self, waiter: _Waiter) -> frozenset[Hashable]:
        """The models that the waiter reserves: those of its earlier choice first."""
        if time.monotonic() < waiter.since + self.turn:
            return frozenset()
        usable = (r for r in self._ledger if r.usable is not None and not r.pinned)
        others = [resident for resident in usable if resident.key != waiter.key]
        others.sort(key=lambda resident: (resident.key not in waiter.reserved, resident.last_used))
        chosen = _enough(others, self._lack(waiter))
        return frozenset(resident.key for resident in (others if chosen is None else chosen))

    def _lack(self, waiter: _Waiter) -> int:
        """Bytes that must become free for its model and rows; not positive: none."""
        if self._ledger.get(waiter.key) is not None:
            return waiter.rows - self._ledger.free
        return waiter.plan.nbytes + max(waiter.rows, self._row_bytes()) - self._ledger.free

    def _row_bytes(self) -> int:
        leases = (lease.row_bytes for resident in self._ledger for lease in resident.leases)
        return max(self._ledger.live_bytes(), *leases, 0)

    def _idle(self, need: int, key: Hashable, before: float = inf) -> list[Resident] | None:
        """Idle models other than `key` with `need` bytes in total, least recently used first.
        `None`: they hold too little. `before`: only those not used since."""
        idle = [r for r in self._ledger if r.idle and not r.pinned and r.last_used <= before]
        others = (resident for resident in idle if resident.key != key)
        return _enough(sorted(others, key=lambda resident: resident.last_used), need)

    def _make_room(self, waiter: _Waiter) -> None:
        key, resident = waiter.key, self._ledger.get(waiter.key)
        leaves = resident is not None and resident.usable is None
        if leaves or self._others_starve(key):
            return
        idle = self._idle(self._lack(waiter), key)
        if idle is None or (resident is not None and not idle):  # nothing that leaves would help
            return
        plan = None
        if resident is None:
            resident, plan = self._ledger.add(key, waiter.plan.nbytes), waiter.plan
        self._loading = key
        arguments = (_detach(idle), resident, plan)
        threading.Thread(target=self._work, args=arguments, name="mlx-load", daemon=True).start()

    # -- loads and departures (their own threads; the lock is free while they block)

    def _work(self, leaving: Sequence[Resident], resident: Resident, plan: LoadPlan | None) -> None:
        """`plan`: `None` if the model is in memory and its rows need more memory."""
        try:
            self._leave(leaving, self._unload)
            if plan is not None:
                self._leave(self._load(resident, plan), self._unload)
        finally:
            with self._changed:
                self._loading = None
                self._serve()
                self._changed.notify_all()

    def _leave(self, leaving: Sequence[Resident], unload: Callable[[Weights], None]) -> None:
        for resident in leaving:
            try:
                if resident.model is not None:
                    unload(resident.model)
            except EngineDied:
                log.warning("a model was lost with its engine thread")
            finally:
                with self._changed:
                    self._ledger.remove(resident)
                    self._serve()

    def _load(self, resident: Resident, plan: LoadPlan) -> Sequence[Resident]:
        """Load a model. Returns those that must leave because it took more than expected."""
        error: MLXProviderError = LoadFailed(f"{plan.name} could not be loaded")
        model: Weights | None = None
        try:
            model = plan.load()
        except MLXProviderError as failure:
            error = for_another(failure)
        finally:
            with self._changed:
                leaving = self._settle(resident, plan.name, model, error)
        return leaving

    def _settle(
        self, resident: Resident, name: str, model: Weights | None, error: MLXProviderError
    ) -> Sequence[Resident]:
        ledger, waiters = self._ledger, [w for w in self.waiting if w.key == resident.key]
        if model is None:
            ledger.remove(resident)
            self._refuse(error, waiters)
            return ()
        resident.model, resident.last_used = model, time.monotonic()
        if model.nbytes > ledger.limit:
            self._refuse(ledger.too_large_error(name, model.nbytes), waiters)
            return _detach([resident])
        for waiter in waiters:
            waiter.plan = replace(waiter.plan, nbytes=model.nbytes)
        others = self._idle(self._row_bytes() - ledger.free, resident.key)
        if others is None:  # this model leaves, and loads again when there is enough memory
            return _detach([resident])
        leaving = _detach(others)
        self._serve()  # before this model counts as idle
        return leaving

    def _await_expiry(self) -> None:
        soonest = min((r.expires_at for r in self._ledger if r.idle), default=inf)
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if soonest < inf and self._closed is None:
            self._expiry = threading.Timer(max(0.0, soonest - time.monotonic()), self._expire)
            self._expiry.daemon = True
            self._expiry.start()

    def _expire(self) -> None:
        with self._changed:
            now = time.monotonic()
            leaving = _detach([r for r in self._ledger if r.idle and r.expires_at <= now])
            self._await_expiry()
        self._leave(leaving, self._unload)


def _enough(candidates: Iterable[Resident], need: int) -> list[Resident] | None:
    """The first candidates that have `need` bytes in total. `None`: all have less."""
    chosen: list[Resident] = []
    for resident in candidates:
        if need <= 0:
            break
        chosen.append(resident)
        need -= resident.nbytes
    return chosen if need <= 0 else None


def _detach(residents: Sequence[Resident]) -> Sequence[Resident]:
    for resident in residents:
        resident.unloading = True
    return residents
