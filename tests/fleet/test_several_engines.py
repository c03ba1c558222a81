"""Prefixes, deaths, returns and restarts behind two proxies that share a Redis."""

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from waiting import wait_until

PATIENCE = 90.0


@pytest.fixture(scope="module")
def fleet(start_fleet: Any, session: Any) -> Any:
    running = start_fleet()
    for name in running.engines:  # each loads its model
        _asked_until(running, session, name)
    return running


def test_a_session_stays_on_its_engine_through_either_proxy(fleet: Any, session: Any) -> None:
    sessions = [session(n) for n in range(12)]
    for _ in range(4):
        with ThreadPoolExecutor(12) as pool:
            assert all(told.whole for told in pool.map(lambda each: each.turn(fleet), sessions))
    places = [{told.engine for told in each.turns} for each in sessions]
    assert all(len(each) == 1 for each in places), places
    assert set().union(*places) == fleet.engines.keys()
    for each in sessions:
        for before, after in zip(each.turns, each.turns[1:], strict=False):
            assert after.cached >= before.prompt - 8, "all of the last prompt but its tail"


def test_a_killed_engine_loses_only_its_own_streams(fleet: Any, session: Any) -> None:
    sessions = [session(100 + n) for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert all(told.whole for told in pool.map(lambda s: s.turn(fleet), sessions))
        first = {each: each.turns[0].engine for each in sessions}
        victim = Counter(first.values()).most_common(1)[0][0]
        engine = fleet.engines[victim]
        long = {"max_tokens": 200, "min_tokens": 200}
        streams = [pool.submit(each.turn, fleet, **long) for each in sessions]
        wait_until(lambda: engine.ask("/health")["running"] > 3)
        engine.end(signal.SIGKILL)
        told = [each.result() for each in streams]
        lost = [each for each in told if not each.whole]
        cut = [each for each, one in zip(sessions, told, strict=True) if not one.whole]
        assert {first[each] for each in cut} <= {victim}, lost
        assert {each.status for each in lost} <= {200, 503}, lost
        after = list(pool.map(lambda s: s.turn(fleet), sessions))
    assert all(each.whole for each in after), [each for each in after if not each.whole]
    assert victim not in {each.engine for each in after}
    engine.start()
    engine.wait()
    _asked_until(fleet, session, victim)
    stayed = [each for each in sessions if first[each] != victim]
    assert all(each.turn(fleet).engine == first[each] for each in stayed)


def test_a_rolling_restart_of_the_engines_loses_no_request(fleet: Any, session: Any) -> None:
    over = threading.Event()
    sessions = [session(1000 + n) for n in range(8)]

    def work(one: Any) -> None:
        while not over.is_set():
            one.turn(fleet, max_tokens=40, min_tokens=40)
            del one.messages[9:]  # keeps prompts short

    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, each) for each in sessions]
        try:
            for name, engine in fleet.engines.items():
                wait_until(lambda: all(each.turns for each in sessions))
                engine.end()
                engine.start()
                engine.wait()
                _asked_until(fleet, session, name)
        finally:
            over.set()
        for each in workers:
            each.result()
    told = [each for one in sessions for each in one.turns]
    assert not [each for each in told if not each.whole]


def test_sessions_keep_their_engine_when_one_proxy_ends(fleet: Any, session: Any) -> None:
    sessions = [session(2000 + n) for n in range(6)]
    places = [each.turn(fleet).engine for each in sessions]
    ended, left = fleet.proxies
    ended.end()
    fleet.proxies = [left]
    assert [each.turn(fleet).engine for each in sessions] == places


def _asked_until(fleet: Any, session: Any, name: str) -> None:
    """Start sessions until one is served there."""
    deadline = time.monotonic() + PATIENCE
    tried = 0
    with ThreadPoolExecutor(4) as pool:
        while True:
            new = [session(5000 + tried + n) for n in range(4)]
            tried += 4
            if name in {told.engine for told in pool.map(lambda each: each.turn(fleet), new)}:
                return
            assert time.monotonic() < deadline, f"{name} is never asked"
            time.sleep(0.2)
