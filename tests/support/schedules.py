"""Requests that come, go and fail while others run, and a drafter that knows their answers but is
wrong for a given share."""

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Phase, Request, SamplingParams
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.isolation import resolve
from mlx_provider.records import DraftRow, LoadedModel
from mlx_provider.testing.driver import (
    Alternating,
    Eager,
    alone,
    new_engine,
    new_request,
    output_of,
)

T = TypeVar("T")


class Calls:
    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]
        self._waiting = queue.SimpleQueue()

    def __call__(self, function: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.put((future, function))
        return future

    def run(self) -> None:
        resolve(*self._waiting.get(timeout=300))


def steps_of(engine: Engine, requests: Iterable[Request]) -> int:
    for request in requests:
        engine.submit(request)
    count = 0
    while not engine.idle:
        engine.step()
        count += 1
    return count


class Oracle:
    def __init__(self, share: float, vocab: int = 256, seed: int = 0) -> None:
        """Wrong guesses are below `vocab`."""
        self.share = share
        self._vocab = vocab
        self._known: list[list[int]] = []
        self._random = np.random.default_rng(seed)

    def learn(self, tokens: Sequence[int]) -> None:
        self._known.append(list(tokens))

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [[self._guess(token) for token in self._next(row)] for row in rows]

    def _next(self, row: DraftRow) -> list[int]:
        size = len(row.tokens)
        found = (text for text in self._known if text[:size] == row.tokens)
        return next(found, [])[size : size + row.wanted]

    def _guess(self, token: int) -> int:
        return token if self._random.random() < self.share else (token + 1) % self._vocab


Answered = Callable[[LoadedModel, Request], Request]

LIKELY = 5
"""Tokens whose log-probabilities each request asks for."""
LAST = 2000


@dataclass(frozen=True)
class Arrival:
    step: int
    length: int
    word: int
    """Prompts of the same word share their beginning."""
    max_tokens: int
    n: int
    kind: int
    cancel_after: int | None
    fails_at: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 25),
        length=st.sampled_from([1, 2, 7, 19, 75, 140]),
        word=st.integers(0, 3),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 1, 2]),
        kind=st.integers(0, 5),
        cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        fails_at=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)),
    ),
    min_size=2,
    max_size=9,
)

KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5),
    SamplingParams(temperature=1.2, min_p=0.05, seed=7, logit_bias=((30, 2.0), (31, -100.0))),
)


def tiny_tokens(arrival: Arrival) -> list[int]:
    return [20 + (arrival.word * 97 + 31 * i) % 340 for i in range(arrival.length)]


def request_of(arrival: Arrival, tokens: Sequence[int]) -> Request:
    request = new_request(
        tokens,
        max_tokens=arrival.max_tokens,
        n=arrival.n,
        params=replace(KINDS[arrival.kind]),
        logprobs=LIKELY,
        min_tokens=3 if arrival.kind == 1 else 0,
        stop_tokens=frozenset({40, 41}) if arrival.kind == 2 else frozenset(),
    )
    cuts = [c for c in (70, 136) if c < arrival.length]  # both worth their pass
    request.prompt = replace(request.prompt, snapshot_points=cuts)
    output_of(request).fails_at = arrival.fails_at
    return request


def run_schedule(
    model: LoadedModel,
    arrivals: Sequence[Arrival],
    layout: str,
    chunk: int,
    prefix_cache: PrefixCache | None = None,
    *,
    scheduler: type[Scheduler] = Alternating,
    mixes: bool = False,
    guessed: float | None = None,
    tokens_of: Callable[[Arrival], Sequence[int]] = tiny_tokens,
    answered: Answered = alone,
    **more: Any,
) -> list[Request]:
    """Submit every request at its step, and run until all end. `guessed`: share of right drafts,
    from the tokens that each request gets `answered` alone; unset: no drafts."""
    requests = [request_of(each, tokens_of(each)) for each in arrivals]
    speculation = None
    if guessed is not None:
        speculation = guessing(model, requests, guessed, answered)
    engine = new_engine(
        model,
        layout=layout,
        mixes=mixes,
        scheduler=scheduler,
        max_chunk=chunk,
        prefix_cache=prefix_cache,
        speculation=speculation,
        **more,
    )
    run_arrivals(engine, arrivals, requests)
    return requests


def run_arrivals(engine: Engine, arrivals: Sequence[Any], requests: Sequence[Request]) -> None:
    """Each request comes at the `step` of its arrival, and leaves `cancel_after` steps later."""
    last = max(a.step + (a.cancel_after or 0) for a in arrivals)
    step = 0
    while step <= last or not engine.idle:
        for arrival, request in zip(arrivals, requests, strict=True):
            if arrival.step == step:
                engine.submit(request)
            if arrival.cancel_after is not None and arrival.step + arrival.cancel_after == step:
                engine.cancel(request)
        engine.step()
        step += 1
        assert step < LAST, "a request never ends"
    assert all(request.phase is Phase.DONE for request in requests)


def guessing(
    model: LoadedModel, requests: Sequence[Request], share: float, answered: Answered = alone
) -> Speculation:
    oracle = Oracle(share)
    for request in requests:
        for row, answer in zip(request.rows, answered(model, request).rows, strict=True):
            oracle.learn([*row.request.prompt.tokens, *answer.tokens])
    return Speculation(Source(oracle), vocab=model.info.vocab_size, policy=Eager())
