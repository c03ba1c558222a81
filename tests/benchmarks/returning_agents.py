"""`stays`: what the prefix cache keeps for agents whose tools run, with memory for a third of it.

Sessions of four kinds of agents are drawn from one seed, with the pauses of tools and of people:
once with assumed pauses, once with those of published traces. The prefix cache and its policy are
the real ones, as in `budgets`; all lengths are divided by `SCALE`. Besides today's eviction, the
same sessions run without regard to open calls, with LRU, and with return times learned or known.

The published pauses (of CacheWise, arXiv 2606.16824, and of vLLM's RFC 52113, none could be had):

- TraceLab, 4,265 sessions of Claude Code and Codex: arXiv 2606.30560; repository uw-syfi/TraceLab,
  0b8a262, `artifacts/tool_calls/tool_latency_distribution/README.md` and
  `artifacts/human_in_the_loop/human_input_wait/README.md`.
- Production traces of an agent (783,000 pauses, of tools and people alike) and of a chatbot
  (42,000): repository gahow/agentic-kvc at gitea.gahow.org, commits 41232f49 and 54e1f526.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from typing import Any, Protocol

from agent_traffic import TAIL, SimRequest, SyntheticModel, Traffic
from mlx_provider.engine.prefix_cache import eviction
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import Node
from replaced import Replaced
from return_times import Returns
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


LONGEST = 14_400.0
"""Seconds of a pause."""


class Pause(Protocol):
    def draw(self, drawn: random.Random) -> float:
        """Seconds."""


@dataclass(frozen=True)
class LogNormal:
    median: float
    sigma: float

    def draw(self, drawn: random.Random) -> float:
        return _lognormal(drawn, self.median, self.sigma, LONGEST)


class Quantiles:
    """Published shares of pauses that are at most so long. The logarithm of the seconds is linear
    between them."""

    def __init__(self, shortest: float, *shares: tuple[float, float], longest: float) -> None:
        """`shortest`, `longest`: assumed. `shares`: of the pauses, with seconds, in their order."""
        self._points = [(0.0, shortest), *shares, (1.0, longest)]

    def draw(self, drawn: random.Random) -> float:
        share = drawn.random()
        for (before, low), (after, high) in pairwise(self._points):
            if share <= after:
                return low * exp((share - before) / (after - before) * log(high / low))
        raise AssertionError(share)


@dataclass(frozen=True)
class Agent:
    """One kind of agent: tokens of its system prompt and of a result, and its pauses."""

    system: int
    turns: float
    """Messages of a person in a session, on average."""
    steps: float
    """Steps that tools start behind each of them, on average."""
    tool: Pause
    person: Pause
    result: float


Agents = Mapping[str, Agent]
ASSUMED: Agents = {
    "claude": Agent(20_900, 4, 8, LogNormal(0.3, 2.97), LogNormal(84, 2.1), 600),
    "codex": Agent(8_800, 3, 14, LogNormal(5, 1.5), LogNormal(120, 1.8), 900),
    "chat": Agent(7_200, 8, 0, LogNormal(1, 1), LogNormal(60, 1.5), 300),
    "batch": Agent(11_500, 1, 20, LogNormal(20, 1.2), LogNormal(1, 1), 1_500),
}
"""The pauses of the first are those of `simulation.workload`; all others are assumptions."""
CLAUDE_TOOLS = Quantiles(0.01, (0.5, 0.129), (0.7, 1), (0.951, 60), longest=3600)
CLAUDE_PEOPLE = Quantiles(1, (0.5, 79), (0.796, 300), (0.964, 3600), longest=LONGEST)
CODEX_TOOLS = Quantiles(0.01, (0.5, 0.626), (0.88, 10), (0.969, 60), longest=3600)
CODEX_PEOPLE = Quantiles(1, (0.5, 95), (0.698, 300), (0.949, 3600), longest=LONGEST)
PRODUCTION = Quantiles(
    0.1, (0.25, 0.69), (0.5, 1.6), (0.75, 8.6), (0.9, 44), (0.99, 738), longest=LONGEST
)
CHATS = Quantiles(1, (0.25, 4.85), (0.5, 7.18), (0.75, 8.22), (0.9, 15), (0.99, 43), longest=600)
PUBLISHED: Agents = {
    "claude": replace(ASSUMED["claude"], tool=CLAUDE_TOOLS, person=CLAUDE_PEOPLE),
    "codex": replace(ASSUMED["codex"], tool=CODEX_TOOLS, person=CODEX_PEOPLE),
    "chat": replace(ASSUMED["chat"], person=CHATS),
    "batch": replace(ASSUMED["batch"], tool=PRODUCTION),
}
"""The same agents with the pauses of published traces."""
PAUSES = {"assumed": ASSUMED, "published": PUBLISHED}


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


def sessions(each: int, span: float, seed: int = 0, *, agents: Agents = ASSUMED) -> list[Session]:
    """So many sessions of each kind, that begin within `span` seconds."""
    drawn, traffic = random.Random(seed), Traffic(seed)
    return [
        Session(f"{kind} {at}", drawn.random() * span, list(_asked(agent, drawn, traffic, system)))
        for kind, agent in agents.items()
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
            pause = (agent.tool if step else agent.person).draw(drawn)
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
    returns: Returns | None = None,
) -> dict[str, float]:
    """The share of prompt tokens that was found, by kind of agent and of all.

    `value`: in the place of eviction's; `retained`: the kind of agent that says it comes back;
    `returns`: the rule of return times that takes eviction's place.
    """
    value = value if returns is None else returns.value
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
            if returns is not None:
                returns.asks(session.name, now)
            served = server.serve(
                asked.request, session.name, calls=asked.calls, retain=kind == retained
            )
            for name in (kind, "all"):
                counted = found.setdefault(name, [0, 0])
                counted[0] += served.cached
                counted[1] += len(asked.request.prompt)
            answered = now + len(asked.request.reply) * SCALE / TOKENS_PER_SECOND
            later = session.asked[number + 1 :]
            comes = answered + later[0].pause if later else None
            if comes is not None:
                heapq.heappush(due, (comes, at, number + 1))
            if returns is not None:
                returns.waits(session.name, answered, comes, calls=asked.calls)
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
    """Hit rates by pauses, layers, seed and rule."""
    rules = {
        "lru": least_recently_used,
        "without calls": without_calls(eviction.value),
        "today": None,
    }
    return [
        {"pauses": pauses, "layers": layers, "seed": seed, "rule": rule, **rates}
        for pauses, agents in PAUSES.items()
        for seed in seeds
        for every in [sessions(each, span, seed, agents=agents)]
        for layers in LAYERS
        for rule, rates in (
            *((rule, hit_rates(every, layers, value)) for rule, value in rules.items()),
            ("today, chats retained", hit_rates(every, layers, retained="chat")),
            ("learned returns", hit_rates(every, layers, returns=Returns(known=False))),
            ("known returns", hit_rates(every, layers, returns=Returns(known=True))),
        )
    ]
