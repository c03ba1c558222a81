"""`bench fleet-simulation`: by hand, by its laws, and what it refuses. No clock is read."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_curves import CHIPS, MODELS, Estimate, simulate
from fleet_simulation import COLUMNS
from mlx_provider.errors import BadRequest
from simulation.account import Account
from simulation.caches import PrefixCache, Tier
from simulation.device import Speed, speed_of
from simulation.engines import Engines, Machine
from simulation.faults import Fault, Faults
from simulation.policies import (
    POLICIES,
    Affinity,
    LeastBusy,
    Stateless,
    first_of,
    preferred,
)
from simulation.run import Run
from simulation.trace import read_trace
from simulation.workload import Shape, Workload, generate

SPEED = Speed(token=0.01, slower=(1.0, 2.0), step=(0.1, 0.2), token_bytes=1)
WIDE = Machine(SPEED, cache_bytes=1e12)
SMALL = Machine(
    Speed(token=4e-4, pair=2e-9, launch=0.01, step=(0.01, 0.012, 0.015), token_bytes=100_000),
    cache_bytes=20e9,
)


class Told(Stateless):
    """Goes where it is told."""

    def __init__(self, engines: int, places: list[int]) -> None:
        super().__init__(engines)
        self.places = iter(places)

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        return next(self.places)


def talks(*asked: list[tuple[float, int, int]], shared: int = 100) -> Workload:
    """Each a conversation of (moment, prompt, answer), all behind one system prompt."""
    rows = [each for talk in asked for each in talk]
    first = [sum(map(len, asked[:n])) for n in range(len(asked) + 1)]
    starts = [talk[0][0] for talk in asked]
    prompts, answers, moments = ([row[n] for row in rows] for n in (1, 2, 0))
    return Workload(starts, first, [0] * len(asked), [shared], prompts, answers, moments, True)


ONE = [(0.0, 150, 10), (100.0, 200, 10), (200.0, 260, 5)]
OTHER = [(50.0, 150, 10)]


def run(work: Workload, name: str, count: int, machine: Machine = SMALL, **more: object) -> Run:
    policy = POLICIES[name](count, 0)
    made = Run(work, Engines(count, machine, one_cache=policy.one_cache), policy, **more)  # type: ignore[arg-type]
    made.done()
    return made


# by hand


def test_one_engine_finds_what_was_said_and_the_system_prompt_of_others() -> None:
    account = run(talks(ONE, OTHER), "affinity", 1, WIDE).account
    # 0; then the other's 100; then 150 + 10; then 200 + 10
    assert (account.prompt, account.memory) == (760, 100 + 160 + 210)
    # uncached tokens at 0.01 s each, and a step
    assert list(account.waits) == pytest.approx([1.6, 0.6, 0.5, 0.6])


def test_a_session_that_moves_finds_what_it_left_behind_and_no_more() -> None:
    engines = Engines(2, WIDE)
    account = Run(talks(ONE, OTHER), engines, Told(2, [0, 1, 1, 0])).done()
    # 0; 0 on a cold engine; there the system prompt; back home 150 + 10 of the first turn
    assert account.memory == 0 + 0 + 100 + 160
    assert account.moved == 2
    assert engines.computed == [150 + 100, 150 + 100]


def test_prompts_wait_for_each_other_and_answers_share_steps() -> None:
    work = talks([(0.0, 100, 10)], [(0.5, 100, 10)], shared=0)
    engines = Engines(1, WIDE)
    account = Run(work, engines, LeastBusy(1)).done()
    # the second waits half a second, then is computed beside a row, twice as slowly
    assert list(account.waits) == pytest.approx([1.0 + 0.1, 0.5 + 2.0 + 0.2])
    assert account.span == pytest.approx(3.0 + 10 * 0.2)


def test_a_summary_keeps_the_system_prompt_alone() -> None:
    work = talks([(0.0, 500, 10), (20.0, 300, 10), (40.0, 320, 10)])
    assert run(work, "affinity", 1, WIDE).account.memory == 0 + 100 + 310
    # the first engine still has what was before the summary, which nobody asks for
    assert Run(work, Engines(2, WIDE), Told(2, [0, 1, 0])).done().memory == 0 + 0 + 100


def test_the_oldest_conversation_makes_room_and_may_lie_on_a_disk() -> None:
    for disk, found in ((None, (100, 0)), (Tier(1000), (100, 110))):
        cache = PrefixCache(Tier(400), disk)
        for talk in (1, 2, 3):
            assert sum(cache.take(talk, 0, 100, 0)) == (100 if talk > 1 else 0)
            cache.keep(talk, 0, 100, 210)
        assert cache.memory.used == 100 + 2 * 110
        assert tuple(cache.take(1, 0, 100, 210)) == found
        assert tuple(cache.take(3, 0, 100, 210)) == (210, 0)
        assert tuple(cache.take(3, 0, 100, 150)) == (150, 0)


def test_what_was_written_last_stays() -> None:
    tier = Tier(300)
    for name, tokens in ((1, 100), (2, 100), (1, 120), (3, 100)):
        tier.keep(name, tokens)
    assert (list(tier.entries), tier.used, tier.dropped) == ([1, 3], 220, 1)


def test_an_engine_that_is_full_hands_on_and_a_full_fleet_is_waited_for() -> None:
    work = talks(*([(0.0, 100, 10)] for _ in range(5)), shared=0)
    engines = Engines(2, Machine(SPEED, cache_bytes=1e12, most=2))
    # two fit; the third is handed on, the fourth fits there, the fifth waits until one has ended
    account = Run(work, engines, Told(2, [0, 0, 0, 1, 1, *[0] * 99])).done()
    assert account.requests == 5
    assert engines.computed == [3 * 100, 2 * 100]
    assert account.refused >= 2
    assert (engines.full, engines.running) == (0, [0, 0])


# laws


WORKS = st.builds(
    generate,
    st.integers(1, 12),
    st.sampled_from([0.02, 0.5]),
    st.integers(0, 2**32),
    st.just(Shape(context=40_000)),
)


@settings(max_examples=12)
@given(WORKS, st.integers(1, 4), st.sampled_from([0.0, 40e9]), st.booleans())
def test_every_request_ends_tokens_are_kept_and_none_passes_the_bound(
    work: Workload, count: int, disk: float, shared: bool
) -> None:
    machine = Machine(SMALL.speed, 5e9, disk, shared)
    rates = {}
    for name in POLICIES:
        made = run(work, name, count, machine)
        account, engines = made.account, made.engines
        rates[name] = account.hit_rate
        assert account.requests == work.requests
        assert account.prompt == sum(work.prompt)
        assert account.memory + account.disk + sum(engines.computed) == account.prompt
        assert made.at == list(work.first[1:])
        assert engines.running == engines.held == [0] * count
        assert min(account.waits) > 0
        assert all(cache.memory.used <= cache.memory.room for cache in engines.caches)
        if count == 1 and name != "bound":
            assert rates[name] == rates["simple-shuffle"], "one engine: nothing to choose"
    assert max(rates.values()) == rates["bound"]


def test_the_same_seed_gives_the_same_figures() -> None:
    def rows(seed: int) -> list[object]:
        work = generate(20, 0.1, seed)
        made = [run(work, name, 3) for name in POLICIES]
        return [
            each.account.row("", each.engines, each.policy.memory) | {"waits": each.account.waits}
            for each in made
        ]

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)


@pytest.mark.parametrize("name", POLICIES)
def test_engines_that_die_lose_time_and_no_request(name: str) -> None:
    work = generate(40, 0.05, 1)
    faults = Faults(deaths=60, down=100).within(3, 20_000.0, 5)
    account = run(work, name, 3, faults=faults).account
    assert account.lost > 0
    assert account.requests == work.requests + account.lost
    rolled = run(work, name, 3, faults=Faults(rolling=60.0).within(3, 1.0, 0)).account
    assert (rolled.lost, rolled.requests) == (0, work.requests)
    kept = run(work, name, 3).account.memory
    assert rolled.memory == kept if name == "bound" else rolled.memory < kept


def test_who_was_on_a_dead_engine_goes_on_another_and_stays_there() -> None:
    work = talks([(0.0, 100, 10), (10.0, 120, 10), (30.0, 140, 10)], shared=0)
    policy, engines = Affinity(2), Engines(2, WIDE)
    home = policy.choose(0, 0, 0b11, 0.0)
    faults = [Fault(11.0, home, back=False), Fault(20.0, home, back=True)]
    account = Run(work, engines, policy, faults).done()
    assert (account.requests, account.lost, account.moved) == (4, 1, 1)
    # 100 + 10 at home; all of the second again, elsewhere; then 120 + 10 there
    assert account.memory == 110 + 0 + 130
    assert (engines.computed[home], engines.computed[1 - home]) == (100 + 10, 120 + 10)
    assert policy.noted.counts.of == engines.running == [0, 0]


def test_a_fleet_that_is_all_gone_is_waited_for() -> None:
    faults = Faults(rolling=10.0, down=100.0).within(1, 1.0, 0)
    account = run(talks([(20.0, 100, 1)]), "affinity", 1, WIDE, faults=faults).account
    assert account.span > 110


def test_an_engines_pace_is_that_of_the_scheduler_on_its_curve() -> None:
    speed, device = speed_of("M5 Max", "30B-A3B"), Estimate(CHIPS["M5 Max"], MODELS["30B-A3B"])
    for rows in (0, 1, 4):
        took = 16_000 / simulate(device, rows, prompt=16_000).rate
        assert speed.prefill(16_000, 0, rows) == pytest.approx(took, rel=0.1)
        assert speed.pace(rows + 1, 9_000) == pytest.approx(device.seconds(rows + 1, 9_000))


# what is drawn, and how engines are chosen


def test_sessions_are_drawn_within_their_bounds() -> None:
    shape = Shape()
    work = generate(400, 1.0, 2, shape)
    assert work.sessions > 400, "titles are conversations, too"
    assert list(work.start) == sorted(work.start)
    assert work.first[work.sessions] == work.requests == len(work.gap) == len(work.answer)
    assert max(work.prompt) < shape.context
    assert min(work.answer) >= 1
    for talk in range(work.sessions):
        assert work.prompt[work.first[talk]] > work.shared[work.prefix[talk]]


def test_a_key_ranks_engines_alike_and_keys_are_spread() -> None:
    firsts = Counter(first_of(key, 16, (1 << 16) - 1) for key in range(1600))
    assert len(firsts) == 16
    assert max(firsts.values()) < 160
    for key in range(50):
        best, then = islice(dict.fromkeys(islice(preferred(key, 16), 200)), 2)
        assert first_of(key, 16, (1 << 16) - 1) == best
        assert first_of(key, 16, (1 << 16) - 1 & ~(1 << best)) == then
        assert first_of(key, 16, 1 << 5) == 5


def test_a_router_that_forgets_its_pins_moves_sessions() -> None:
    work = generate(60, 1.0, 3)
    kept, short = (Run(work, Engines(4, SMALL), Affinity(4, most)).done() for most in (None, 20))
    assert kept.moved < short.moved
    assert kept.hit_rate > short.hit_rate


# traces of one's own

LINE = {"time": 1.0, "session": "a", "prompt": 20, "answer": 5}


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    rows = [
        LINE | {"time": 5.0, "prefix": "p", "prefix_tokens": 15, "prompt": 40},
        LINE | {"session": "b", "time": 2.0, "prefix": "p", "prefix_tokens": 12},
        LINE | {"prefix": "p", "prefix_tokens": 15},
        LINE | {"session": "c", "time": 9},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    work = read_trace(path)
    assert (work.start, work.first) == ([1.0, 2.0, 9.0], [0, 2, 3, 4])
    assert (work.prompt, work.gap) == ([20, 40, 20, 20], [1.0, 5.0, 2.0, 9.0])
    assert [work.shared[each] for each in work.prefix] == [12, 12, 0]
    # a: 0, then 20 + 5; b: 12; c: 0
    assert run(work, "affinity", 1, WIDE).account.memory == 25 + 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no request"),
        ("{", "line 1: the line: Invalid JSON"),
        ('{"time": 1}', "line 1: session: Field required"),
        (json.dumps(LINE) + "\n" + json.dumps(LINE | {"prompt": 0}), "line 2: prompt: "),
        (json.dumps(LINE | {"time": -1}), "line 1: time: "),
        (json.dumps(LINE).replace("1.0", "NaN"), "line 1: "),
        (json.dumps(LINE | {"prefix_tokens": 21}), "line 1: prefix_tokens exceeds prompt"),
        (json.dumps(LINE | {"more": 1}), "line 1: more: "),
        (json.dumps(LINE | {"session": "a" * 5000}), "line 1 is longer than 4096 bytes"),
        ((json.dumps(LINE) + "\n") * 3, "more than 2 lines"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadRequest, match=said):
        read_trace(path, lines=2)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="nowhere: No such file"):
        read_trace(tmp_path / "nowhere")


# the command


def test_the_command_shows_a_row_for_each_policy_and_fleet(benchmark_here, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE))
    result = benchmark_here(
        "fleet-simulation", "--engines", "1", "--engines", "2", "--sessions", "3"
    )
    assert [row["engines"] for row in result["rows"]] == [1] * len(POLICIES) + [2] * len(POLICIES)
    assert {row["policy"] for row in result["rows"]} == POLICIES.keys()
    assert all(set(COLUMNS.values()) <= row.keys() for row in result["rows"])
    traced = benchmark_here("fleet-simulation", "--trace", str(path), "--policy", "affinity")
    assert [row["requests"] for row in traced["rows"]] == [1, 1, 1]
    for option in ("--policy", "--chip", "--model"):
        with pytest.raises(BadRequest, match="is none of"):
            benchmark_here("fleet-simulation", option, "none")


def test_an_account_of_nothing_has_no_hits() -> None:
    assert Account().hit_rate == 0
