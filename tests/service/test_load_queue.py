"""The memory ledger, and the order in which requests get models: no device, small numbers."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from mlx_provider.errors import EngineDied, LoadFailed, MemoryInUse, RequestFailed, RequestTimedOut
from mlx_provider.serving.load_queue import LoadPlan, LoadQueue
from mlx_provider.serving.residents import PINNED, Lease, MemoryLedger
from waiting import PATIENCE, wait_until


@dataclass
class Model:
    name: str
    nbytes: int
    live_bytes: int = 0


@dataclass
class Shelf:
    """A queue for models of 10 bytes each; a test can delay their loads."""

    limit: int = 25
    patience: float = PATIENCE
    turn: float = PATIENCE
    real: dict[str, int] = field(default_factory=dict)
    """The real bytes of models, if they differ from the expected ones."""
    broken: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    loads: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    most: int = 0
    """The most bytes that were in memory at once."""

    def __post_init__(self) -> None:
        self.gate.set()
        self.held: dict[str, int] = {}
        self.ledger: MemoryLedger = MemoryLedger(lambda: self.limit)
        self.queue: LoadQueue = LoadQueue(
            self.ledger, self.unload, patience=self.patience, turn=self.turn
        )
        self.threads = ThreadPoolExecutor(32)

    def plan(self, name: str, expected: int = 10) -> LoadPlan:
        return LoadPlan(name, expected, lambda: self.load(name))

    def load(self, name: str) -> Model:
        self.loads.append(name)
        assert self.gate.wait(PATIENCE)
        if name in self.broken:
            raise LoadFailed(f"{name} is broken")
        size = self.real.get(name, 10)
        self.held[name] = size
        self.most = max(self.most, sum(self.held.values()))
        return Model(name, size)

    def unload(self, model: Model) -> None:
        self.gone.append(model.name)
        del self.held[model.name]

    def get(self, name: str, **more: Any) -> Lease:
        return self.queue.acquire(name, lambda: self.plan(name), **more)

    def ask(self, name: str, *, places: int = 0, **more: Any) -> Future[Lease]:
        """`places`: waits until the queue has so many requests."""
        asked = self.threads.submit(self.get, name, **more)
        wait_until(lambda: len(self.queue.waiting) == places or not places)
        return asked

    def use(self, name: str) -> None:
        self.get(name).release()

    @property
    def taken(self) -> int:
        return self.limit - self.ledger.free

    @property
    def names(self) -> set[str]:
        return {model.name for model in self.queue.models()}


MakeShelf = Callable[..., Shelf]


@pytest.fixture
def shelf() -> Iterator[MakeShelf]:
    made: list[Shelf] = []

    def make(**chosen: Any) -> Shelf:
        made.append(Shelf(**chosen))
        return made[-1]

    yield make
    for each in made:
        each.gate.set()
        each.queue.close(EngineDied("the test is over"))
        each.threads.shutdown()


# -- the ledger


def test_the_ledger_reserves_corrects_and_releases() -> None:
    ledger: MemoryLedger = MemoryLedger(lambda: 100)
    first = ledger.add("a", 30)
    ledger.add("b", 40)
    assert (ledger.free, ledger.bytes_of("a")) == (30, 30)
    first.model = Model("a", 65, live_bytes=7)
    assert (ledger.free, ledger.live_bytes()) == (-5, 7), "more was taken than there is"
    for _ in range(2):
        ledger.remove(first)
    assert (ledger.free, ledger.bytes_of("a"), ledger.live_bytes()) == (60, 0, 0)
    with pytest.raises(ValueError, match="already"):
        ledger.add("b", 1)
    second = ledger.add("a", 20)
    ledger.remove(first)
    assert ledger.get("a") is second


# -- loading


def test_two_loads_reserve_before_they_begin(shelf: MakeShelf) -> None:
    s = shelf(limit=15, patience=0.05)
    s.gate.clear()
    first = s.ask("a")
    wait_until(lambda: s.loads == ["a"])
    with pytest.raises(MemoryInUse):
        s.get("b")
    s.gate.set()
    first.result(PATIENCE)
    assert s.most == 10


def test_waiters_of_one_model_share_its_load(shelf: MakeShelf) -> None:
    s = shelf(patience=0.05)  # a load can take longer
    s.gate.clear()
    asked = [s.ask("a") for _ in range(8)]
    wait_until(lambda: bool(s.loads))
    time.sleep(0.1)
    s.gate.set()
    assert {id(each.result(PATIENCE).model) for each in asked} == {id(s.queue.models()[0])}
    assert s.loads == ["a"]


def test_a_failing_load_wakes_all_with_its_error_and_releases_its_bytes(shelf: MakeShelf) -> None:
    s = shelf()
    s.broken = {"a"}
    s.gate.clear()
    asked = [s.ask("a") for _ in range(5)]
    wait_until(lambda: len(s.queue.waiting) == 5)
    s.gate.set()
    for each in asked:
        with pytest.raises(LoadFailed, match="a is broken"):
            each.result(PATIENCE)
    assert (s.loads, s.taken) == (["a"], 0)
    s.broken = set()
    assert s.get("a").model.name == "a"


def test_a_load_continues_if_one_waiter_leaves(shelf: MakeShelf) -> None:
    s = shelf()
    s.gate.clear()
    first = s.ask("a", who="one")
    wait_until(lambda: s.loads == ["a"])
    second = s.ask("a", who="two", places=2)
    s.queue.withdraw("one")
    with pytest.raises(RequestFailed):
        first.result(PATIENCE)
    s.gate.set()
    assert second.result(PATIENCE).model.name == "a"


def test_a_waiter_that_left_loads_nothing(shelf: MakeShelf) -> None:
    s = shelf(limit=10)
    held = s.get("a")
    waiting = s.ask("b", who="gone", places=1)
    s.queue.withdraw("gone")
    with pytest.raises(RequestFailed):
        waiting.result(PATIENCE)
    held.release()
    s.use("a")
    assert s.loads == ["a"]


@pytest.mark.parametrize("expected", [100, 10])
def test_a_model_that_never_fits_is_refused_with_its_figures(
    shelf: MakeShelf, expected: int
) -> None:
    s = shelf(real={"huge": 100})
    s.use("a")
    with pytest.raises(LoadFailed, match="100 bytes of weights; the memory limit leaves 25"):
        s.queue.acquire("huge", lambda: s.plan("huge", expected))
    wait_until(lambda: s.taken == 10)
    s.use("a")
    assert "b" not in s.held


def test_a_model_larger_than_expected_unloads_others(shelf: MakeShelf) -> None:
    s = shelf(real={"c": 14}, limit=23)
    for name in "abc":
        s.use(name)
    assert (s.names, s.taken) == ({"c"}, 14)


def test_a_model_larger_than_expected_waits_again_for_models_in_use(shelf: MakeShelf) -> None:
    s = shelf(real={"c": 20}, limit=25)
    held = s.get("a")
    waiting = s.ask("c")
    wait_until(lambda: s.gone == ["c"])
    assert (s.names, s.taken) == ({"a"}, 10)
    held.release()
    assert waiting.result(PATIENCE).model.nbytes == 20
    assert s.taken == 20


# -- leases


def test_a_leased_model_is_not_unloaded_until_its_release(shelf: MakeShelf) -> None:
    s = shelf(limit=15)
    lease = s.get("a")
    waiting = s.ask("b", places=1)
    assert s.names == {"a"}
    lease.release()
    lease.release()
    waiting.result(PATIENCE)
    assert s.names == {"b"}


def test_the_wait_is_bounded_and_its_error_has_retry_after(shelf: MakeShelf) -> None:
    s = shelf(limit=15, patience=0.05)
    held = s.get("a")
    with pytest.raises(MemoryInUse, match="b has to wait for memory: it takes 10 of") as refused:
        s.get("b")
    assert "and 1 other models are in use" in refused.value.message
    assert "and 0 other models are in use" in s.ledger.in_use_error("a", "a", 10).message
    assert refused.value.status == 503
    assert refused.value.retry_after
    assert "prompt" not in refused.value.message
    held.release()
    assert s.get("b").model.name == "b", "nothing is left of the refusal"


def test_a_request_does_not_outwait_its_own_limit(shelf: MakeShelf) -> None:
    s = shelf(limit=15)
    held = s.get("a")
    with pytest.raises(RequestTimedOut):
        s.get("b", deadline=time.monotonic() + 0.02)
    held.release()


def test_waiting_requests_are_served_in_order(shelf: MakeShelf) -> None:
    s = shelf(limit=10)
    held = s.get("a")
    served: list[str] = []

    def ask(name: str) -> None:
        lease = s.get(name)
        served.append(name)
        lease.release()

    waiting = []
    for count, name in enumerate("bcd", 1):
        waiting.append(s.threads.submit(ask, name))
        wait_until(lambda count=count: len(s.queue.waiting) == count)
    held.release()
    for each in waiting:
        each.result(PATIENCE)
    assert served == ["b", "c", "d"]


def test_new_requests_do_not_keep_a_model_busy_forever(shelf: MakeShelf) -> None:
    s = shelf(limit=10, turn=0.02)
    first = s.get("a")
    waiting = s.ask("b")
    wait_until(lambda: bool(s.queue.reserved))
    newcomer = s.ask("a", places=2)
    first.release()
    lease = waiting.result(PATIENCE)
    assert not newcomer.done()
    lease.release()
    assert newcomer.result(PATIENCE).model.name == "a"


# -- rows


def test_weights_never_use_the_reserved_memory_of_rows(shelf: MakeShelf) -> None:
    s = shelf(limit=25)
    lease = s.get("a")
    assert lease.try_reserve(9)
    waiting = s.ask("b", places=1)
    assert s.loads == ["a"], "10 and 10 leave less than 9"
    assert lease.try_reserve(5)
    lease.release()
    waiting.result(PATIENCE)
    assert s.names == {"a", "b"}


def test_running_rows_keep_their_memory(shelf: MakeShelf) -> None:
    s = shelf(limit=25, patience=0.05)
    lease = s.get("a")
    lease.model.live_bytes = 9
    with pytest.raises(MemoryInUse):
        s.get("b")
    lease.model.live_bytes = 5
    assert s.get("b").model.name == "b"


def test_a_request_whose_rows_do_not_fit_unloads_an_idle_model(shelf: MakeShelf) -> None:
    s = shelf(limit=25)
    s.use("a")
    lease = s.get("b")
    assert not lease.try_reserve(12)
    lease.release()
    lease = s.get("b", rows=12)
    assert (s.names, lease.row_bytes) == ({"b"}, 12)


def test_the_engine_can_unload_idle_models_at_once(shelf: MakeShelf) -> None:
    s = shelf(limit=25)
    s.use("a")
    lease = s.get("b")
    free: list[int] = []

    def unload(model: Model) -> None:
        free.append(s.ledger.free)
        s.unload(model)

    s.queue.make_way("b", 12, 0, unload, stuck=False)
    assert s.gone == [], "rows that run will end; a has not rested"
    s.queue.make_way("b", 12, 0, unload, stuck=True)
    assert (s.gone, free, s.ledger.free) == (["a"], [5], 15), "it counts until it is gone"
    lease.release()


def test_rows_that_wait_for_memory_precede_new_requests(shelf: MakeShelf) -> None:
    s = shelf(limit=25)
    stuck, other = s.get("a"), s.get("b")
    assert s.queue.others_go_on("a")
    s.queue.make_way("a", 12, 0, s.unload, stuck=True)
    assert s.gone == []
    newcomer = s.ask("b", places=1)
    other.release()
    s.queue.make_way("a", 12, 0, s.unload, stuck=True)
    assert s.gone == ["b"]
    stuck.release()
    assert newcomer.result(PATIENCE).model.name == "b"


# -- endings


def test_an_idle_model_is_unloaded_after_its_time_but_none_in_use(shelf: MakeShelf) -> None:
    s = shelf(limit=100)
    used = s.get("used", keep_alive=0.01)
    s.get("kept").release()
    s.get("brief", keep_alive=0.01).release()
    s.get("longer", keep_alive=PATIENCE).release()
    s.get("longer", keep_alive=0.01).release()
    s.get("longer").release()
    wait_until(lambda: s.names == {"used", "kept", "longer"})
    wait_until(lambda: s.taken == 30)
    used.release()
    wait_until(lambda: s.names == {"kept", "longer"})
    assert sorted(s.gone) == ["brief", "used"]
    s.get("brief", keep_alive=0).release()
    wait_until(lambda: s.gone.count("brief") == 2)


def test_a_pinned_model_is_never_unloaded_for_others(shelf: MakeShelf) -> None:
    s = shelf(patience=0.05)
    s.get("pinned", keep_alive=PINNED).release()
    s.get("pinned", keep_alive=0).release()
    for name in ("a", "b", "c"):
        s.use(name)
    assert s.names == {"pinned", "c"}
    held = s.get("c")
    with pytest.raises(MemoryInUse, match=r"10 are pinned \(keep_alive: -1\)"):
        s.get("d")
    held.release()
    assert s.names == {"pinned", "c"}


def test_closing_refuses_waiting_and_new_requests(shelf: MakeShelf) -> None:
    s = shelf(limit=10)
    s.get("a")
    waiting = s.ask("b", places=1)
    s.queue.close(EngineDied("closing"))
    with pytest.raises(EngineDied):
        waiting.result(PATIENCE)
    with pytest.raises(EngineDied):
        s.get("a")


def test_many_requests_stay_within_memory_and_all_are_served(shelf: MakeShelf) -> None:
    s = shelf(limit=35, turn=0.01)

    def client(number: int) -> int:
        served = 0
        for step in range(12):
            lease = s.get("abcdefg"[(number * 5 + step * 3) % 7], deadline=inf)
            if not lease.try_reserve(4 + step % 3):
                lease.release()
                lease = s.get(lease.model.name, rows=4 + step % 3)
            time.sleep(0.0005 * (step % 3))
            served += lease.model.name in s.held
            lease.release()
        return served

    assert sum(s.threads.map(client, range(16))) == 16 * 12
    assert s.most <= 30
    assert len(s.queue.waiting) == 0
