"""Prefixes, deaths, returns and restarts behind two proxies that share a Redis."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

PATIENCE = 90.0


@pytest.fixture(scope="module")
def fleet(start_fleet: Any) -> Any:
    running = start_fleet()
    for number in range(8):  # each engine has loaded its model
        assert running.ask([{"role": "user", "content": f"Hello {number}!"}]).whole
    return running


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="")

    return show


def test_sessions_stay_with_their_prefix_whichever_proxy_they_come_by(
    fleet: Any, session: Any, shown: Any
) -> None:
    sessions = [session(n) for n in range(12)]
    for _ in range(4):
        for each in sessions:
            assert each.turn(fleet).whole
    places = [{told.engine for told in each.turns} for each in sessions]
    assert all(len(each) == 1 for each in places), places
    assert set().union(*places) == {engine.place for engine in fleet.engines}
    for each in sessions:
        for before, after in zip(each.turns, each.turns[1:], strict=False):
            assert after.cached >= before.prompt - 8, "all of the last prompt but its tail"
    later = [told for each in sessions for told in each.turns[1:]]
    rate = sum(told.cached for told in later) / sum(told.prompt for told in later)
    shown(f"{len(sessions)} sessions, 4 turns over 2 proxies: none moved, {rate:.1%} cached")
    shown(f"in Redis: {len(fleet.redis.keys('*session*'))} sessions")


def test_an_engine_that_is_killed_under_32_streams_costs_what_it_held(
    fleet: Any, session: Any, shown: Any
) -> None:
    sessions = [session(100 + n) for n in range(32)]
    with ThreadPoolExecutor(32) as pool:
        assert all(told.whole for told in pool.map(lambda s: s.turn(fleet), sessions))
        first = {each: each.turns[0].engine for each in sessions}
        victim = fleet.engine(Counter(first.values()).most_common(1)[0][0])
        long = {"max_tokens": 200, "min_tokens": 200}
        streams = [pool.submit(each.turn, fleet, **long) for each in sessions]
        _until(lambda: victim.ask("/health")["running"] > 3)
        victim.end(signal.SIGKILL)
        told = [each.result() for each in streams]
        lost = [each for each in told if not each.whole]
        cut = [each for each, one in zip(sessions, told, strict=True) if not one.whole]
        assert {first[each] for each in cut} == {victim.place}, lost
        assert {each.status for each in lost} <= {200, 503}, lost
        assert all("engine" in each.error for each in lost), lost
        began = time.monotonic()
        after = list(pool.map(lambda s: s.turn(fleet), sessions))
        took = time.monotonic() - began
    assert all(each.whole for each in after), [each for each in after if not each.whole]
    assert victim.place not in {each.engine for each in after}
    stayed = [each for each in sessions if first[each] != victim.place]
    moves = [(first[each], [told.engine for told in each.turns]) for each in stayed]
    assert all(set(turns) == {place} for place, turns in moves), (victim.place, moves)
    begun = sum(bool(each.text) for each in lost)
    moved = len(sessions) - len(stayed)
    shown(
        f"killed under 32 streams: {len(lost)} cut ({begun} after their first words), "
        f"{32 - len(lost)} whole, {moved} sessions moved, {len(stayed)} stayed; "
        f"32 next turns in {took:.2f} s, the slowest began after "
        f"{max(each.seconds for each in after):.2f} s"
    )
    victim.start()
    victim.wait()
    began = time.monotonic()
    tried = _asked_until(fleet, session, victim.place)
    shown(f"back: used again after {time.monotonic() - began:.1f} s and {tried} new sessions")
    assert all(each.turn(fleet).engine == first[each] for each in stayed)


def test_a_rolling_restart_of_the_engines_loses_no_request(
    fleet: Any, session: Any, shown: Any
) -> None:
    over = threading.Event()
    sessions = [session(1000 + n) for n in range(8)]

    def work(one: Any) -> None:
        while not over.is_set():
            one.turn(fleet, max_tokens=40, min_tokens=40)
            del one.messages[9:]  # keeps prompts short

    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, each) for each in sessions]
        try:
            for engine in fleet.engines:
                _until(lambda: all(each.turns for each in sessions))
                engine.end()
                engine.start()
                engine.wait()
                _asked_until(fleet, session, engine.place)
        finally:
            over.set()
        for each in workers:
            each.result()
    told = [each for one in sessions for each in one.turns]
    assert not [each for each in told if not each.whole]
    moves = sum(
        a.engine != b.engine
        for one in sessions
        for a, b in zip(one.turns, one.turns[1:], strict=False)
    )
    shown(f"both engines restarted: {len(told)} requests, none lost, {moves} moves of sessions")


def test_a_proxy_that_ends_takes_no_session_with_it(fleet: Any, session: Any, shown: Any) -> None:
    sessions = [session(2000 + n) for n in range(6)]
    places = [each.turn(fleet).engine for each in sessions]
    ended, left = fleet.proxies
    ended.end()
    fleet.proxies = [left]
    assert [each.turn(fleet).engine for each in sessions] == places
    shown(f"one proxy ended: {len(sessions)} sessions stay where they were")


def _until(found: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _asked_until(fleet: Any, session: Any, place: str) -> int:
    """How many new sessions it takes until one is served there."""
    deadline = time.monotonic() + PATIENCE
    tried = 0
    while session(5000 + tried).turn(fleet).engine != place:
        tried += 1
        assert time.monotonic() < deadline, f"{place} is never asked"
        time.sleep(0.2)
    return tried + 1
