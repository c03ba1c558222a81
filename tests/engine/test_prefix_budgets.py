"""Of a prompt that is larger than the prefix budget, the part that fits is stored."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache

from agent_traffic import TAIL, Layers, SimRequest, SyntheticModel, Traffic, in_order
from integrity import check_integrity
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.snapshots import GRID, WORTH_A_PASS
from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids
from small_budgets import TOKEN_BYTES, Server, replay, sessions

KINDS: tuple[Layers, ...] = ("kv", "quantised", "window", "hybrid", "state")
WINDOW, STATE = 24, 40
"""Tokens of a window; tokens that a state takes as much as."""


def visible(layer: Any) -> list[mx.array]:
    """The keys and values that the next token attends to."""
    if isinstance(layer, RotatingKVCache):
        seen = min(WINDOW - 1, layer.offset)
        return [in_order(layer, a)[..., -seen:, :] for a in (layer.keys, layer.values)]
    held = [a for _, a in tree_flatten(layer.state) if isinstance(a, mx.array)]
    return [a[..., : layer.offset, :] for a in held] if hasattr(layer, "offset") else held


class Bounded(PrefixCache):
    """Checks its invariants after each insertion."""

    def __init__(self, limit: int) -> None:
        super().__init__(budget=lambda: limit)
        self.limit = limit
        self.key = CacheKey("")
        """Of the last entry."""

    def insert(self, *given: Any, **more: Any) -> int:
        self.key = given[0]
        stored = super().insert(*given, **more)
        check_integrity(self)
        assert self.nbytes <= self.limit
        return stored


class Compared(Server):
    """Checks that a restored row has the contents of a cold one, and continues equally."""

    def check(self, asked: SimRequest) -> None:
        ids = as_ids(asked.prompt)
        cache: Bounded = self.policy.cache
        match = cache.match(cache.key, ids, len(ids) - 1)
        restored, cold = cache.acquire(match, self.model.make_cache)[0], self.model.make_cache()
        self.model.feed(cold, ids, 0, match.length)
        for start, stop in ((match.length, len(ids) - 1), (len(ids) - 1, len(ids))):
            for row in (restored, cold):
                self.model.feed(row, ids, start, stop)
        for mine, its in zip(restored, cold, strict=True):
            for held, wanted in zip(visible(mine), visible(its), strict=True):
                assert mx.array_equal(held, wanted)


def what_fits(model: SyntheticModel, budget: int) -> int:
    """Minimum number of tokens, with a state at their end, that fit into `budget` bytes."""
    state = {
        "kv": 0, "quantised": 0, "window": WINDOW * model.unit, "hybrid": STATE * model.unit,
        "state": 3 * STATE * model.unit,
    }[model.layers]  # fmt: skip
    windows = WINDOW * model.unit if model.layers == "window" else 0
    room = max(0, budget - state - windows) // model.unit
    if model.layers in ("kv", "quantised"):
        return room
    return max(0, room - GRID - WORTH_A_PASS)


@given(
    layers=st.sampled_from(KINDS),
    budget=st.integers(0, 1500),
    first=st.integers(10, 1500),
    growths=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    chunk=st.sampled_from([64, 256]),
)
def test_each_turn_reuses_the_part_that_fits(
    layers: Layers, budget: int, first: int, growths: list[int], chunk: int
) -> None:
    traffic = Traffic(first)
    model = SyntheticModel(layers, window=WINDOW, state_units=STATE)
    cache = Bounded(budget * model.unit)
    server = Compared(cache, model, chunk=chunk)
    history = traffic.tokens(first)
    stored = 0
    for growth in growths:
        asked = SimRequest(history + TAIL, (min(20, len(history)), len(history)), [5, 6, 7])
        server.check(asked)
        fits = what_fits(model, cache.limit)
        request = server.serve(asked)
        assert request.cached_tokens + request.prefilled_tokens == len(asked.prompt)
        assert request.cached_tokens >= min(stored, fits)
        stored = len(history) - (0 if layers in ("kv", "quantised") else WORTH_A_PASS + len(TAIL))
        history = history + TAIL + [5, 6, 7] + traffic.tokens(growth)
    server.check(SimRequest(history, (len(history),), []))


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid"])
@pytest.mark.parametrize("budget", [200, 400, 800])
def test_an_agent_on_a_small_budget_computes_little_more_than_it_must(
    layers: Layers, budget: int
) -> None:
    """Scaled by 1/100: an agent with 60,000 tokens, budgets of 20,000, 40,000 and 80,000 tokens."""
    traffic, history, asked = Traffic(1), [], []
    history = traffic.tokens(500)
    for _ in range(6):
        asked.append(SimRequest(history + TAIL, (60, len(history)), [5, 6]))
        history = history + TAIL + [5, 6] + traffic.tokens(15)
    model = SyntheticModel(layers, window=8, state_units=30)
    cache = Bounded(budget * model.unit)
    server = Server(cache, model, chunk=64)
    server.serve(asked[0])
    for last, now in pairwise(asked):
        request = server.serve(now)
        state = {"kv": 0, "window": 3 * 8, "hybrid": 30}[layers]
        grid = {"kv": 0, "window": WORTH_A_PASS, "hybrid": GRID + WORTH_A_PASS}[layers]
        assert request.cached_tokens >= min(len(last.prompt), budget - state) - grid - len(TAIL)


@pytest.mark.parametrize("layers", ["window", "hybrid"])
@pytest.mark.parametrize("budget", [190, 230, 270, 310])
def test_a_reply_with_another_tokenization_evicts_no_state_of_its_prompt(
    layers: Layers, budget: int
) -> None:
    traffic = Traffic(1)
    history = traffic.tokens(120)
    model = SyntheticModel(layers, window=WINDOW, state_units=STATE)
    server = Compared(Bounded(budget * model.unit), model, chunk=64)
    server.serve(SimRequest(history, (70,), traffic.tokens(15)))
    after = SimRequest(history + traffic.tokens(40), (70,), traffic.tokens(15))
    server.check(after)
    assert server.serve(after).cached_tokens == len(history)


def test_a_replay_counts_computed_tokens() -> None:
    drawn = list(sessions(1, start=6200, turns=3))
    roomy = replay("kv", 20_000, drawn)
    tight = replay("kv", 3000, drawn)
    assert roomy.computed < roomy.least + 200 < 2000
    assert tight.computed == tight.least == tight.prompt - 3000
    assert roomy.bytes_over == tight.bytes_over == 0


def agent(seed: int, tokens: int, turns: int) -> list[SimRequest]:
    """Prompts of one agent; each ends with one new message."""
    traffic = Traffic(seed)
    history, asked = traffic.tokens(tokens), []
    for _ in range(turns):
        asked.append(SimRequest(history + TAIL, (60, len(history)), [5, 6]))
        history = history + TAIL + [5, 6] + traffic.tokens(15)
    return asked


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid"])
@pytest.mark.parametrize("agents", [2, 3])
def test_agents_that_take_turns_each_keep_a_share(layers: Layers, agents: int) -> None:
    model = SyntheticModel(layers, window=8, state_units=30)
    cache = Bounded(500 * agents * model.unit)
    server = Server(cache, model, chunk=64)
    every = [agent(seed, 800, 6) for seed in range(agents)]
    for turn in range(6):
        for name, asked in enumerate(every):
            request = server.serve(asked[turn], str(name))
            if turn > 2:  # each agent has returned by then
                assert request.cached_tokens >= what_fits(model, 500 * model.unit) - len(TAIL)


@pytest.mark.parametrize(
    ("layers", "budget", "most"), [("kv", 50_000, 1300), ("window", 60_000, 1200)]
)
def test_agents_without_a_common_prompt_keep_the_heads_of_their_paths(
    layers: Any, budget: int, most: int
) -> None:
    """The agents compute little more than the tokens beyond their share, of 11,000 a turn."""
    drawn = [Traffic(seed).agent(tasks=1, steps=8) for seed in range(5)]
    assert replay(layers, budget, drawn).computed < most


def test_states_of_sessions_that_return_leave_the_budget_whole() -> None:
    """A session keeps more bytes than those of its tokens."""
    traffic, model = Traffic(0), SyntheticModel("state", state_units=30)
    server = Server(Bounded(700 * model.unit), model, chunk=64)
    histories = {name: traffic.tokens(20) for name in "abc"}
    for name in "abc" * 3:
        histories[name] += traffic.tokens(10)
        asked = SimRequest(histories[name] + TAIL, (len(histories[name]),), [5, 6])
        server.serve(asked, name)
    for size in (100, 300, 500):
        server.serve(SimRequest(traffic.tokens(size) + TAIL, (size,), [5, 6]), "a")


def test_the_next_session_gets_the_whole_budget_after_one_ends() -> None:
    model = SyntheticModel("kv")
    server = Server(Bounded(1000 * model.unit), model, chunk=64)
    for seed, name in enumerate(("one", "other"), 1):
        for last, now in pairwise(agent(seed, 900, 3)):
            server.serve(last, name)
            assert server.serve(now, name).cached_tokens == len(last.prompt) + 2
    for now in agent(3, 900, 2):
        server.serve(now, "one")
        server.serve(now, "third")
    for now in agent(4, 900, 12):  # the others do not return
        request = server.serve(now, "fourth")
    assert request.cached_tokens == 1000


@pytest.mark.parametrize("will_return", [{}, {"calls": True}, {"retain": True}])
@pytest.mark.parametrize("layers", ["kv", "hybrid"])
def test_a_session_that_will_return_is_evicted_after_others(
    layers: Any, will_return: dict[str, bool]
) -> None:
    """Its tools run, or its client says that it comes back."""
    model, traffic = SyntheticModel(layers, state_units=STATE, window=WINDOW), Traffic(0)
    first, second, third = (
        SimRequest(prompt, (950,), traffic.tokens(8))
        for prompt in (traffic.tokens(1000) for _ in range(3))
    )
    room = 2500 * TOKEN_BYTES[layers]
    server = Server(PrefixCache(budget=lambda: room), model)
    server.serve(first, "first", **will_return)
    server.serve(second, "second")
    server.serve(third, "third")
    stays, goes = (first, second) if will_return else (second, first)
    assert server.serve(stays).cached_tokens > 900
    assert server.serve(goes).cached_tokens < 900
