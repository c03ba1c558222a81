"""What coding agents ask: sessions, their requests, tokens and pauses, drawn from one seed.

Where a figure says TraceLab, it is fitted to the tables of its trace of 4,265 sessions of Claude
Code and Codex (arXiv 2606.30560; repository uw-syfi/TraceLab, `artifacts/session/*/*.tex`,
`artifacts/trace_facts/paper_macros`). All others are assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, tau
from typing import Any

import numpy as np

Array = Any
"""A NumPy array."""
DAY = 86_400.0


@dataclass(frozen=True)
class Workload:
    """Conversations in the order of their starts; their requests lie one behind the other.

    Request i of conversation s is at `first[s] + i`. A prompt that is not shorter than the one
    before repeats that and its answer; a shorter one has only its system prompt from before.
    """

    start: Sequence[float]
    """Seconds."""
    first: Sequence[int]
    """Where a conversation's requests begin; one more than there are conversations."""
    prefix: Sequence[int]
    """Which system prompt a conversation has."""
    shared: Sequence[int]
    """Tokens of each system prompt."""
    prompt: Sequence[int]
    answer: Sequence[int]
    gap: Sequence[float]
    """Seconds between an answer's end and the request; with `timed`, the earliest moment of it."""
    timed: bool = False

    @property
    def sessions(self) -> int:
        return len(self.start)

    @property
    def requests(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class LogNormal:
    median: float
    sigma: float
    most: float

    def draw(self, random: np.random.Generator, count: int) -> Array:
        """float32; above `most` cut."""
        drawn = random.standard_normal(count, dtype=np.float32)
        drawn *= np.float32(self.sigma)
        drawn += np.float32(log(self.median))
        return np.minimum(np.exp(drawn, out=drawn), np.float32(self.most), out=drawn)


@dataclass(frozen=True)
class Client:
    """A coding agent: its share of all sessions, and the tokens of its first request."""

    share: float
    shared: int
    titles: bool = False
    """Whether it asks for a title beside."""


CLIENTS = (
    Client(0.30, 20_900, titles=True),
    Client(0.20, 11_500),
    Client(0.25, 8_800),
    Client(0.15, 7_200, titles=True),
    Client(0.10, 17_900),
)
"""Claude Code 2.1.197 and 2.1.329, Codex 0.169, OpenCode 1.18, Qwen Code 0.15: tokens as their
requests were captured; shares are assumptions."""


@dataclass(frozen=True)
class Shape:
    """How sessions look."""

    turns: LogNormal = LogNormal(1.5, 1.94, 12)
    """Requests of people in a session. TraceLab: median 1, p90 18, p99 137; cut at 12."""
    alone: float = 0.45
    """Share of them that take no tool. TraceLab: p25 0, median 1."""
    tools: LogNormal = LogNormal(6.6, 1.22, 40)
    """Steps that tools start, of the others. TraceLab: mean 7.8, p90 20, p99 86; cut at 40."""
    tool_seconds: LogNormal = LogNormal(0.3, 2.97, 600)
    """TraceLab: median 0.3, p90 13.6, p99 216."""
    people_seconds: LogNormal = LogNormal(84, 2.1, 4 * 3600)
    """TraceLab: median 84, p90 1,236, 96 % below an hour; cut at four hours."""
    result: LogNormal = LogNormal(600, 1.3, 30_000)
    """Tokens of a tool's result or of what a person writes. TraceLab: median 875 with the answer
    before it, p90 about 4,000."""
    answer: LogNormal = LogNormal(214, 1.34, 16_000)
    """Tokens. TraceLab: median 214, mean 523."""
    opening: int = 3_000
    """Tokens behind the system prompt: of a first message with its files, and of a summary."""
    context: int = 100_000
    """Tokens at which a client puts a summary in the place of a conversation."""
    again: float = 0.005
    """Share of requests that are sent twice."""
    again_seconds: float = 5.0
    variants: int = 8
    """System prompts of each client: folders and MCP servers differ. The n-th has 1/n of the
    first one's sessions."""
    title: int = 600
    """Tokens of a request for a title, of which half are its system prompt."""
    daily: float = 0.6
    """The rate of new sessions goes this much above and below its mean, once a day."""


def generate(
    sessions: int, per_second: float, seed: int = 0, shape: Shape | None = None
) -> Workload:
    """So many sessions at a mean rate; titles are conversations of their own on top."""
    shape = shape or Shape()
    random = np.random.default_rng(seed)
    starts = _starts(random, sessions, per_second, shape.daily)
    clients = random.choice(len(CLIENTS), sessions, p=[each.share for each in CLIENTS])
    variant = random.choice(shape.variants, sessions, p=_zipf(shape.variants))
    prefix = (clients * shape.variants + variant).astype(np.int32)
    shared = np.repeat([each.shared for each in CLIENTS], shape.variants)
    counts, people = _requests(random, sessions, shape)
    first = np.concatenate(([0], np.cumsum(counts)))
    answer = np.maximum(1, shape.answer.draw(random, first[-1])).astype(np.int32)
    prompt = _prompts(random, shape, first, answer, shared[prefix])
    gap = _gaps(random, shape, people)
    prompt, answer, gap, counts = _sent_again(random, shape, first, prompt, answer, gap)
    made = _with_titles(shape, clients, starts, prefix, shared, counts, prompt, answer, gap)
    return _packed(*made)


def _starts(random: np.random.Generator, count: int, rate: float, daily: float) -> Array:
    """Poisson arrivals along a day's curve, ascending."""
    span = count / rate
    clock = np.linspace(0.0, span, 4096)
    wave = clock + daily * DAY / tau * (1 - np.cos(tau * clock / DAY))
    return np.interp(np.sort(random.random(count)) * wave[-1], wave, clock)


def _zipf(count: int) -> Array:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def _requests(random: np.random.Generator, sessions: int, shape: Shape) -> tuple[Array, Array]:
    """Requests of each session; whether a person, not a tool, started each of all requests."""
    turns = np.maximum(1, shape.turns.draw(random, sessions)).astype(np.int64)
    total = int(turns.sum())
    tools = np.maximum(1, shape.tools.draw(random, total)).astype(np.int64)
    tools[random.random(total) < shape.alone] = 0
    steps = tools + 1
    ends = np.cumsum(steps)
    people = np.zeros(int(ends[-1]), bool)
    people[ends - steps] = True
    counts = np.add.reduceat(steps, np.cumsum(turns) - turns)
    return counts, people


def _prompts(
    random: np.random.Generator, shape: Shape, first: Array, answer: Array, shared: Array
) -> Array:
    """Tokens of each prompt: what was before, its answer, and a result; summed up at `context`."""
    grown = shape.result.draw(random, len(answer)).astype(np.int64)
    grown[1:] += answer[:-1]
    grown[first[:-1]] = 0
    counts = np.diff(first)
    total = np.cumsum(grown)
    total -= np.repeat(total[first[:-1]], counts)
    base = shared + shape.opening
    span = np.maximum(1, shape.context - base)
    return (np.repeat(base, counts) + total % np.repeat(span, counts)).astype(np.int32)


def _gaps(random: np.random.Generator, shape: Shape, people: Array) -> Array:
    gap = shape.tool_seconds.draw(random, len(people))
    gap[people] = shape.people_seconds.draw(random, int(people.sum()))
    return gap


def _sent_again(
    random: np.random.Generator,
    shape: Shape,
    first: Array,
    prompt: Array,
    answer: Array,
    gap: Array,
) -> tuple[Array, Array, Array, Array]:
    """The same, with some requests twice; and the requests of each session."""
    times = 1 + (random.random(len(prompt)) < shape.again)
    ends = np.cumsum(times)
    gap = np.repeat(gap, times)
    gap[ends[times == 2] - 1] = shape.again_seconds
    counts = np.add.reduceat(times, first[:-1])
    return np.repeat(prompt, times), np.repeat(answer, times), gap, counts


def _with_titles(
    shape: Shape,
    clients: Array,
    starts: Array,
    prefix: Array,
    shared: Array,
    counts: Array,
    prompt: Array,
    answer: Array,
    gap: Array,
) -> tuple[Array, ...]:
    """Titles behind the sessions, as one more system prompt."""
    asked = np.array([each.titles for each in CLIENTS])[clients]
    more = int(asked.sum())
    ones = np.ones(more, np.int64)
    return (
        np.concatenate((starts, starts[asked])),
        np.concatenate((prefix, ones * len(shared))),
        np.concatenate((shared, [shape.title // 2])),
        np.concatenate((counts, ones)),
        np.concatenate((prompt, ones * shape.title)).astype(np.int32),
        np.concatenate((answer, ones * 20)).astype(np.int32),
        np.concatenate((gap, 0.0 * ones)).astype(np.float32),
    )


def _packed(
    starts: Array,
    prefix: Array,
    shared: Array,
    counts: Array,
    prompt: Array,
    answer: Array,
    gap: Array,
) -> Workload:
    """In the order of starts, as sequences that hold Python's own numbers."""
    order = np.argsort(starts, kind="stable")
    begins = np.cumsum(counts) - counts
    sizes = counts[order]
    first = np.concatenate(([0], np.cumsum(sizes)))
    at = np.repeat(begins[order] - first[:-1], sizes) + np.arange(first[-1])
    return Workload(
        start=_plain(starts[order]),
        first=_plain(first.astype(np.int64)),
        prefix=_plain(prefix[order].astype(np.int32)),
        shared=[int(each) for each in shared],
        prompt=_plain(prompt[at]),
        answer=_plain(answer[at]),
        gap=_plain(gap[at]),
    )


def _plain(array: Array) -> Any:
    """Indexing a memoryview gives Python's numbers, three times as fast as NumPy's."""
    return memoryview(np.ascontiguousarray(array))  # type: ignore[arg-type]
