"""Model families: a request gets the same result alone and in a batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from ...engine.execution.probe import exact_rows
from ...engine.fixed_shapes import FixedShapes
from ...engine.prefix_cache.cache import PrefixCache
from ...engine.request import Phase, Request, SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...protocol.events import Event, Failed, TokenLogprob
from ...records import LoadedModel, Prompt
from ..driver import Alternating, alone, new_engine, new_request, output_of, run
from ..schedules import ARRIVALS, KINDS, Arrival, run_schedule
from .check import NotApplicable, demand, same
from .examples import for_examples
from .prompts import LONG, QUESTION, conversation, picture, seen
from .specimens import Specimen

GREEDY = SamplingParams(temperature=0)
SCHEDULES = 4
ONE_BY_ONE = {"afm7": "upstream rounds keys to steps, which another batch moves"}
"""Our tiny models that decode alone, and why."""
GRID = 16


def layouts(of: Specimen) -> None:
    if next(iter(of.model.kv_layouts)) == "solo":
        raise NotApplicable("its kv_layouts offer no layout in which rows share a pass")
    notes = "; ".join(of.probe.notes)
    if of.probe.layout == "solo" and of.checkpoint.label in ONE_BY_ONE:
        raise NotApplicable(f"{ONE_BY_ONE[of.checkpoint.label]}: {notes}")
    demand(of.probe.layout != "solo", f"rows do not decode together: {notes}")


def company(of: Specimen) -> None:
    kept = PrefixCache(budget=lambda: 2**22)
    schedulers = st.sampled_from([Scheduler, Alternating])
    given = st.tuples(ARRIVALS, st.sampled_from([16, 32, 64]), st.booleans(), schedulers)

    def check(value: tuple[list[Arrival], int, bool, type[Scheduler]]) -> None:
        arrivals, chunk, stored, scheduler = value
        if not of.exact:  # another rounding draws other tokens
            arrivals = [replace(each, kind=0) for each in arrivals]
        requests = run_schedule(
            of.model,
            arrivals,
            of.probe.layout,
            chunk,
            kept if stored else None,
            scheduler=scheduler,
            mixes=of.probe.mixes,
            tokens_of=lambda each: of.tokens(each.length, each.word),
        )
        for arrival, request in zip(arrivals, requests, strict=True):
            cut = arrival.cancel_after is not None or arrival.fails_at is not None
            _as_alone(of, request, cut=cut, what=f"in the company of {len(arrivals) - 1} others")

    for_examples(given, SCHEDULES, check, shrinks=False)


def prefix_reuse(of: Specimen) -> None:
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26), max_chunk=64)
    turns = conversation(of, QUESTION)
    cold = _asked(engine, of, turns)
    same(cold.cached, 0, "tokens of a first prompt that were found in an empty cache")
    repeat = _asked(engine, of, turns)
    demand(
        2 * repeat.cached >= len(repeat.prompt.tokens),
        f"of {len(repeat.prompt.tokens)} tokens asked again only {repeat.cached} are found: "
        "Prompt.snapshot_points say where state is kept, the cache's classes what can be cut",
    )
    answer = {"role": "assistant", "content": "Sunny."}
    after = _asked(engine, of, [*turns, answer, {"role": "user", "content": "And Rome?"}])
    demand(after.cached > 0, "the next turn finds nothing of the turn before")
    other = _asked(engine, of, conversation(of, "Who are you?"))
    for request, what in (
        (cold, "cold"),
        (repeat, "asked again"),
        (after, "in the next turn"),
        (other, "behind a stored system text"),
    ):
        _as_alone(of, request, what=what)


def reproducible(of: Specimen) -> None:
    together = 3 if of.probe.layout == "grouped" else 1
    rows = exact_rows(of.model, of.model.make_cache, together).rows
    shapes = FixedShapes(rows=rows, tokens=GRID)

    def engine(**more: Any) -> Any:
        return new_engine(of.model, fixed=shapes, max_chunk=shapes.tokens, **more)

    def fresh() -> list[Request]:
        return [
            new_request(of.tokens(length, word), max_tokens=9, params=params, logprobs=2)
            for length, word, params in (
                (45, 0, GREEDY),
                (LONG, 0, KINDS[4]),
                (5, 2, GREEDY),
                (33, 3, KINDS[3]),
            )
        ]

    single_bits = []
    for request in fresh():
        single = engine()
        single.submit(request)
        run(single)
        single_bits.append(_bits(request))
    crowd = engine(prefix_cache=PrefixCache(budget=lambda: 2**26))
    for what in ("in company", "in company, from the prefix cache"):
        requests = fresh()
        for request in requests:
            crowd.submit(request)
            crowd.step()
        run(crowd)
        for request, bits in zip(requests, single_bits, strict=True):
            same(_bits(request), bits, f"{what}, a reproducible request gives other bits")


def _bits(request: Request) -> list[Any]:
    output = output_of(request)
    return [output.tokens, [each.logprob for each in output.logprobs]]


def faults(of: Specimen) -> None:
    made: list[int] = []

    def make_cache() -> list[Any]:
        cache = of.model.make_cache()
        made.append(len(cache))
        return [_failing(each) for each in cache] if len(made) == 2 else cache

    watched = [new_request(of.tokens(20 + 9 * i, i), max_tokens=12, logprobs=5) for i in range(3)]
    engine = new_engine(
        _Unsteady(of.model), layout=of.probe.layout, make_cache=make_cache, scheduler=Alternating
    )
    events: list[Event] = []
    for request in watched:
        engine.submit(request)
        events += [event for _, posted in engine.step() for event in posted]
    failed = [event for event in events + run(engine) if isinstance(event, Failed)]
    same(len(failed), 1, "failed requests where one pass of one row raises")
    for request in (watched[0], watched[2]):
        _as_alone(of, request, what="beside a row whose pass failed")


class _Unsteady:
    """Its third pass of several rows raises at its end."""

    def __init__(self, inner: LoadedModel) -> None:
        self._inner = inner
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decode(self, tokens: mx.array, *args: Any, **more: Any) -> mx.array:
        logits = self._inner.decode(tokens, *args, **more)
        self._passes += tokens.size > 1
        if tokens.size > 1 and self._passes == 3:
            raise RuntimeError("a pass that a device gave up")
        return logits


def _failing(layer: Any) -> Any:
    def fails(self: Any, *args: Any, **more: Any) -> Any:
        raise RuntimeError("a pass that a device gave up")

    kind = type(layer)
    layer.__class__ = type(
        kind.__name__, (kind,), {"update_and_fetch": fails, "__setitem__": fails}
    )
    return layer


def cancellation(of: Specimen) -> None:
    kept: list[weakref.ref[Any]] = []

    def make_cache() -> list[Any]:
        cache = of.model.make_cache()
        kept.extend(weakref.ref(layer) for layer in cache)
        return cache

    engine = new_engine(of.model, layout=of.probe.layout, max_chunk=16, make_cache=make_cache)
    for steps in (2, 8):
        request = new_request(of.tokens(LONG, 7), max_tokens=20)
        engine.submit(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        run(engine)
        demand(request.phase is Phase.DONE, "a cancelled request does not end")
    after = new_request(of.tokens(30, 7), max_tokens=8, logprobs=5)
    engine.submit(after)
    run(engine)
    _as_alone(of, after, what="after cancelled requests")
    del engine, request, after
    gc.collect()
    alive = [reference() for reference in kept if reference() is not None]
    names = sorted({type(each).__name__ for each in alive})
    demand(not alive, f"{len(alive)} caches of rows that ended are still held: {names}")


def images(of: Specimen) -> None:
    if "image" not in of.model.info.media:
        raise NotApplicable("its models take text only")
    first, second = _prompt(of, 1), _prompt(of, 2)
    for prompt in (first, second):
        same(len(prompt.spans), 1, "spans of a prompt with one image")
        span = prompt.spans[0]
        inside = 0 <= span.start < span.end <= len(prompt.tokens)
        demand(inside, f"the span {span.start}..{span.end} lies outside of the prompt")
    one, other = first.spans[0].content_hash, second.spans[0].content_hash
    demand(one != other, "two images have one content_hash: one is answered for the other")
    again = _prompt(of, 1).spans[0].content_hash
    same(again, one, "content_hash of the same image")
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26))
    asked = [
        _run(engine, of, _prompt(of, seed, words))
        for seed, words in ((1, "what is this " * 12), (1, "who"), (2, "who"), (1, "who"))
    ]
    question, other_picture = asked[1], asked[2]
    demand(
        question.cached >= question.prompt.spans[0].end,
        f"another question on the same image finds {question.cached} tokens of the "
        f"{question.prompt.spans[0].end} up to its end",
    )
    demand(
        other_picture.cached <= other_picture.prompt.spans[0].start,
        f"another image finds {other_picture.cached} tokens, beyond its beginning",
    )
    for request in asked:
        _as_alone(of, request, what="with an image, from the prefix cache")


def _prompt(of: Specimen, seed: int, words: str = "who") -> Prompt:
    messages = [*conversation(of, "")[:-1], seen(words)]
    return of.model.prepare(messages, tools=[], media=[picture(seed)], variables={})


def _asked(engine: Any, of: Specimen, messages: Sequence[dict[str, Any]]) -> Request:
    return _run(engine, of, of.model.prepare(messages, tools=[], media=[], variables={}))


def _run(engine: Any, of: Specimen, prompt: Prompt) -> Request:
    request = new_request(prompt.tokens, max_tokens=8, logprobs=5)
    request.prompt = prompt
    engine.submit(request)
    run(engine)
    return request


def _as_alone(of: Specimen, request: Request, *, what: str, cut: bool = False) -> None:
    twin = alone(of.model, request)
    for choice in range(len(request.rows)):
        found, own = output_of(request, choice), output_of(twin, choice)
        if not cut:
            same(len(found.tokens), len(own.tokens), f"{what}, a reply has other tokens")
        for at, pair in enumerate(zip(found.logprobs, own.logprobs, strict=False)):
            if not _same_token(of, *pair, f"{what}, token {at} of a reply"):
                break


def _same_token(of: Specimen, found: TokenLogprob, alone: TokenLogprob, what: str) -> bool:
    """Raises `Nonconformity` unless rounding explains the difference."""
    if found.id == alone.id:
        apart = abs((found.logprob or 0.0) - (alone.logprob or 0.0))
        summary = f"{what} has another log-probability than alone, by {apart:.3g}"
        demand(apart <= of.tolerance, f"{summary}, where rounding explains {of.tolerance:.3g}")
        return True
    near = {each.id: each.logprob or 0.0 for each in alone.top}.get(found.id)
    summary = f"{what} is {found.id}, alone it is {alone.id}"
    demand(not of.exact and near is not None, summary)
    behind = (alone.logprob or 0.0) - (near or 0.0)
    demand(behind <= 2 * of.tolerance, f"{summary}, likelier by {behind:.3g}")
    return False
