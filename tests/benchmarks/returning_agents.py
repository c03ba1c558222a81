"""`stays`: what the prefix cache keeps for agents whose tools run, with memory for a third of it.

Sessions of four kinds of agents are drawn from one seed, with the pauses of tools and of people.
The prefix cache and its policy are the real ones, as in `budgets`; all lengths are divided by
`SCALE`. Besides today's eviction, the same sessions run without regard to open calls, and with LRU.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import exp
from typing import Any

from agent_traffic import TAIL, SimRequest, SyntheticModel, Traffic
from mlx_provider.engine.prefix_cache import eviction
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import Node
from replaced import Replaced
from small_budgets import TOKEN_BYTES, Kind, Server

SCALE = 64
STATE = 3000 // SCALE
"""Tokens whose KV is as large as one recurrent state."""
LAYERS: tuple[Kind, ...] = ("kv", "hybrid")
CONTEXT = 100_000
"""Tokens at which an agent puts a summary in the place of a conversation."""
OPENING = 3_000
TOKENS_PER_SECOND = 60.0
ANSWER = (214.0, 1.34, 16_000.0)
"""Median, sigma and most tokens, as in `simulation.workload`."""


@dataclass(frozen=True)
class Agent:
    """One kind of agent: tokens of its system prompt and of a result, and its pauses."""

    system: int
    turns: float
    """Messages of a person in a session, on average."""
    steps: float
    """Steps that tools start behind each of them, on average."""
    tool: tuple[float, float]
    """Median and sigma of the seconds of a tool,"""
    person: tuple[float, float]
    """and of a person."""
    result: float


AGENTS = {
    "claude": Agent(20_900, 4, 8, (0.3, 2.97), (84, 2.1), 600),
    "codex": Agent(8_800, 3, 14, (5, 1.5), (120, 1.8), 900),
    "chat": Agent(7_200, 8, 0, (1, 1), (60, 1.5), 300),
    "batch": Agent(11_500, 1, 20, (20, 1.2), (1, 1), 1_500),
}
"""The pauses of the first are those of `simulation.workload`; all others are assumptions."""


@dataclass(frozen=True)
class Asked:
    """One request of a session."""

    pause: float
    """Seconds since the answer before it."""
    request: SimRequest
    calls: bool
    """Whether its answer ends in calls."""


@dataclass(frozen=True)
class Session:
    name: str
    start: float
    asked: Sequence[Asked]

    @property
    def tokens(self) -> int:
        """Of its longest prompt with its answer."""
        return max(len(each.request.prompt) + len(each.request.reply) for each in self.asked)


def sessions(each: int, span: float, seed: int = 0) -> list[Session]:
    """So many sessions of each kind, that begin within `span` seconds."""
    drawn, traffic = random.Random(seed), Traffic(seed)
    return [
        Session(f"{kind} {at}", drawn.random() * span, list(_asked(agent, drawn, traffic, system)))
        for kind, agent in AGENTS.items()
        for system in [traffic.tokens(agent.system // SCALE)]
        for at in range(each)
    ]


def _asked(
    agent: Agent, drawn: random.Random, traffic: Traffic, system: list[int]
) -> Iterator[Asked]:
    history = system + traffic.tokens(OPENING // SCALE)
    for _ in range(max(1, round(drawn.expovariate(1 / agent.turns)))):
        steps = round(drawn.expovariate(1 / agent.steps)) if agent.steps else 0
        for step in range(steps + 1):
            pause = _lognormal(drawn, *(agent.tool if step else agent.person), 14_400)
            reply = traffic.tokens(max(1, int(_lognormal(drawn, *ANSWER)) // SCALE))
            request = SimRequest(history + TAIL, (len(system), len(history)), reply)
            yield Asked(pause, request, step < steps)
            result = int(_lognormal(drawn, agent.result, 1.3, 30_000)) // SCALE
            history = history + TAIL + reply + traffic.tokens(max(1, result))
            if len(history) > CONTEXT // SCALE:
                history = system + traffic.tokens(OPENING // SCALE)


def _lognormal(drawn: random.Random, median: float, sigma: float, most: float) -> float:
    return min(most, median * exp(sigma * drawn.gauss(0, 1)))


def hit_rates(
    every: Sequence[Session],
    layers: Kind,
    value: Callable[..., float] | None = None,
    *,
    retained: str | None = None,
) -> dict[str, float]:
    """The share of prompt tokens that was found, by kind of agent and of all.

    `value`: in the place of eviction's; `retained`: the kind of agent that says it comes back.
    """
    model = SyntheticModel(layers, state_units=STATE, window=8)
    budget = sum(each.tokens for each in every) // 3 * TOKEN_BYTES[layers]
    server = Server(PrefixCache(budget=lambda: budget), model)
    found: dict[str, list[int]] = {}
    due = [(session.start, at, 0) for at, session in enumerate(every)]
    heapq.heapify(due)
    with Replaced() if value is not None else nullcontext() as patch:
        if patch is not None:
            patch.setattr(eviction, "value", value)
        while due:
            now, at, number = heapq.heappop(due)
            session = every[at]
            asked = session.asked[number]
            kind = session.name.split()[0]
            served = server.serve(
                asked.request, session.name, calls=asked.calls, retain=kind == retained
            )
            for name in (kind, "all"):
                counted = found.setdefault(name, [0, 0])
                counted[0] += served.cached
                counted[1] += len(asked.request.prompt)
            if number + 1 < len(session.asked):
                took = len(asked.request.reply) * SCALE / TOKENS_PER_SECOND
                heapq.heappush(due, (now + took + session.asked[number + 1].pause, at, number + 1))
    return {name: cached / prompt for name, (cached, prompt) in found.items()}


def least_recently_used(node: Node, clock: int, held: int) -> float:
    return 1.0 + node.used if node.complete or node.snapshot is not None else 0.0


def without_calls(original: Callable[..., float]) -> Callable[..., float]:
    """Today's value, as if no call were open."""

    def value(node: Node, clock: int, held: int) -> float:
        found = original(node, clock, held)
        return found * eviction.PINNED / eviction.AWAITED if node.awaited else found

    return value


def run(each: int = 12, span: float = 400, seeds: Sequence[int] = (0, 1, 2)) -> list[Any]:
    """Hit rates by layers, seed and rule."""
    rules = {
        "lru": least_recently_used,
        "without calls": without_calls(eviction.value),
        "today": None,
    }
    rows = []
    for seed in seeds:
        every = sessions(each, span, seed)
        for layers in LAYERS:
            for name, value in rules.items():
                rows.append(
                    {
                        "layers": layers,
                        "seed": seed,
                        "rule": name,
                        **hit_rates(every, layers, value),
                    }
                )
            rows.append(
                {
                    "layers": layers,
                    "seed": seed,
                    "rule": "today, chats retained",
                    **hit_rates(every, layers, retained="chat"),
                }
            )
    return rows
