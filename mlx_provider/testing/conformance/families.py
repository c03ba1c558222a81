"""Model families: a request gets the same result alone and in a batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from ...engine.execution import noise
from ...engine.execution.exactness import exact_rows
from ...engine.fixed_shapes import FixedShapes
from ...engine.prefix_cache.cache import PrefixCache
from ...engine.request import Phase, Request, SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...errors import MLXProviderError
from ...isolation import Isolation
from ...protocol.events import Event, Failed, TokenLogprob
from ...records import LoadedModel, LoadOptions, Prompt
from ..driver import Alternating, new_engine, new_request, output_of, run
from ..schedules import ARRIVALS, KINDS, Arrival, run_schedule
from ..tiny.greedy import start
from .check import Check, NotApplicable, demand, same
from .examples import for_examples
from .specimens import Specimen

GREEDY = SamplingParams(temperature=0)
LONG = 75
"""Tokens of a prompt that is longer than a tiny model's sliding window."""
SCHEDULES = 4
SYSTEM = "You look up weather. " * 8
QUESTION = "How is it in Paris? " * 8
ONE_BY_ONE = {"afm7": "upstream rounds keys to steps, which another batch moves"}
"""Our tiny models that decode alone, and why."""
GRID = 16
"""Tokens of a pass of a reproducible model."""


# -- what a model says of itself


def description(of: Specimen) -> None:
    """Its `info`, and a prompt of its template."""
    info, prompt = of.model.info, ask(of, QUESTION)
    wanted = "float32" if of.exact else "low"
    same(info.precision, wanted, f"info.precision of weights in {of.kept_in}")
    demand(info.context_length > 0, "info.context_length is no number of tokens")
    demand(info.weights_bytes > 0, "info.weights_bytes is no number of bytes")
    odd = [t for t in info.stop_tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"stop tokens {odd} are beyond the vocabulary of {info.vocab_size}")
    vocab = start(of.model, Prompt(of.tokens(3, 0))).logits.shape
    same(tuple(vocab), (info.vocab_size,), "the shape of logits, where info.vocab_size is told")
    demand(len(prompt.tokens) > 0, "a prompt of its template has no tokens")
    odd = [t for t in prompt.tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"tokens {odd[:9]} of a prompt are beyond the vocabulary")
    points = list(prompt.snapshot_points)
    demand(points == sorted(points), f"snapshot_points {points} do not ascend")
    demand(
        all(0 < p <= len(prompt.tokens) for p in points), f"snapshot_points {points} lie outside"
    )
    text = "The weather in Paris: 22 degrees, ça va."
    tokenizer = of.model.tokenizer
    same(
        tokenizer.decode(tokenizer.encode(text, special=False)), text, "text read back from tokens"
    )
    if not of.exact:
        other = of.checkpoint.specimen("float32").model.info.fingerprint
        demand(info.fingerprint != other, "info.fingerprint is the same for other weights")


def control_tokens(of: Specimen) -> None:
    """A user's text that looks like a control token is spelt in letters."""
    special = {
        token.content: number
        for number, token in of.model.tokenizer.fast.get_added_tokens_decoder().items()
        if token.special
    }
    if not special:
        raise NotApplicable("its tokenizer has no control tokens")
    plain = list(ask(of, "x").tokens)
    for text, number in special.items():
        found = list(ask(of, f"x {text} y").tokens)
        summary = f"a user who types {text!r} writes the control token {number}"
        demand(found.count(number) <= plain.count(number), summary)


def bad_input(of: Specimen) -> None:
    """An empty folder, an image for a model of text, turns that a template may refuse."""
    _typed(
        "loading a folder without weights",
        lambda: of.family.load(_without_weights(of), LoadOptions()),
        must=True,
    )
    prepare = of.model.prepare
    user = {"role": "user", "content": "a"}
    for turns in (
        [user, user],
        [{"role": "assistant", "content": "b"}, user],
        [user, {"role": "assistant", "content": "b"}],
        [user, {"role": "system", "content": "c"}, user],
        [user, {"role": "tool", "content": "22", "tool_call_id": "x"}],
        [{"role": "system", "content": "c"}],
    ):
        _typed(
            f"messages {turns}",
            lambda turns=turns: prepare(turns, tools=[], media=[], variables={}),  # type: ignore[misc]
        )
    if "image" not in of.model.info.media:
        _typed(
            "an image for a model that cannot see",
            lambda: prepare([_seen("x")], tools=[], media=[_picture(1)], variables={}),
            must=True,
        )


def _without_weights(of: Specimen) -> Any:
    folder = of.checkpoint.new_folder()
    for path in of.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _typed(what: str, run_it: Callable[[], object], *, must: bool = False) -> None:
    """A raised error is one of ours; `must`: one is raised."""
    with Isolation() as trying:
        run_it()
    if trying.fault is None:
        demand(not must, f"{what} raises nothing")
        return
    summary = f"{what} raises no error of mlx_provider.errors: {trying.fault.summary}"
    demand(isinstance(trying.fault.error, MLXProviderError), summary)


# -- one row


def chunked_prefill(of: Specimen) -> None:
    """A prompt in chunks of any size."""
    prompt = Prompt(of.tokens(LONG, 3))
    whole = start(of.model, prompt).logits
    for size in (1, 7, 32):
        _near(of, whole, start(of.model, prompt, chunk=size).logits, f"in chunks of {size}")


def one_by_one(of: Specimen) -> None:
    """Tokens that are decoded, and the same tokens as a prompt."""
    tokens, begun = of.tokens(LONG, 4), LONG - 8
    whole = start(of.model, Prompt(tokens)).logits
    row = start(of.model, Prompt(tokens[:begun]))
    logits = row.logits
    for at in range(begun, LONG):
        ids, positions = (mx.array([each], dtype=mx.int32) for each in (tokens[at], at))
        logits = of.model.decode(ids, row.cache, positions)[0]
        mx.eval(logits)
    _near(of, whole, logits, "decoded one by one")


def _near(of: Specimen, expected: mx.array, found: mx.array, how: str) -> None:
    apart = noise.spread(expected, found)
    summary = f"{how}, log-probabilities differ by {apart:.3g} from those of the prompt at once"
    demand(apart <= of.bound, f"{summary}, where rounding explains {of.bound:.3g}")


# -- rows in company


def layouts(of: Specimen) -> None:
    """Each of its layouts."""
    if next(iter(of.model.kv_layouts)) == "solo":
        raise NotApplicable("its kv_layouts offer no layout in which rows share a pass")
    notes = "; ".join(of.probe.notes)
    if of.probe.layout == "solo" and of.checkpoint.label in ONE_BY_ONE:
        raise NotApplicable(f"{ONE_BY_ONE[of.checkpoint.label]}: {notes}")
    demand(of.probe.layout != "solo", f"rows do not decode together: {notes}")


def company(of: Specimen) -> None:
    """Requests that join, leave, are cancelled and fail, with and without a prefix cache."""
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
    """A repeated prompt, the next turn, another question."""
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
    """Equal bits with `reproducible: true`."""
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

    alone = []
    for request in fresh():
        single = engine()
        single.submit(request)
        run(single)
        alone.append(_bits(request))
    crowd = engine(prefix_cache=PrefixCache(budget=lambda: 2**26))
    for what in ("in company", "in company, from the prefix cache"):
        requests = fresh()
        for request in requests:
            crowd.submit(request)
            crowd.step()
        run(crowd)
        for request, bits in zip(requests, alone, strict=True):
            same(_bits(request), bits, f"{what}, a reproducible request gives other bits")


def _bits(request: Request) -> list[Any]:
    output = output_of(request)
    return [output.tokens, [each.logprob for each in output.logprobs]]


# -- what goes wrong


def faults(of: Specimen) -> None:
    """A pass that fails in a row's prompt, and a pass of several rows that fails."""
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
    """A model whose third pass of several rows raises at its end."""

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
    """A cache of the same class whose use raises."""

    def fails(self: Any, *args: Any, **more: Any) -> Any:
        raise RuntimeError("a pass that a device gave up")

    kind = type(layer)
    layer.__class__ = type(
        kind.__name__, (kind,), {"update_and_fetch": fails, "__setitem__": fails}
    )
    return layer


def cancellation(of: Specimen) -> None:
    """Requests cancelled in their prompt and in their reply: the next request is not affected, and
    nothing of their rows stays."""
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


# -- images


def images(of: Specimen) -> None:
    """Two images never share a prefix; text before the same image does."""
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
        _run(engine, of, _prompt(of, picture, words))
        for picture, words in ((1, "what is this " * 12), (1, "who"), (2, "who"), (1, "who"))
    ]
    question, picture = asked[1], asked[2]
    demand(
        question.cached >= question.prompt.spans[0].end,
        f"another question on the same image finds {question.cached} tokens of the "
        f"{question.prompt.spans[0].end} up to its end",
    )
    demand(
        picture.cached <= picture.prompt.spans[0].start,
        f"another image finds {picture.cached} tokens, beyond its beginning",
    )
    for request in asked:
        _as_alone(of, request, what="with an image, from the prefix cache")


def _prompt(of: Specimen, picture: int, words: str = "who") -> Prompt:
    messages = [*conversation(of, "")[:-1], _seen(words)]
    return of.model.prepare(messages, tools=[], media=[_picture(picture)], variables={})


def _seen(words: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}


def _picture(seed: int) -> Any:
    from ..tiny.media import tiny_image

    return tiny_image(seed)


# -- requests


def conversation(of: Specimen, question: str) -> list[dict[str, Any]]:
    """A system text, if the template shows one, and a question."""
    system = [{"role": "system", "content": SYSTEM}] if of.model.info.system_role else []
    return [*system, {"role": "user", "content": question}]


def ask(of: Specimen, question: str) -> Prompt:
    messages = [{"role": "user", "content": question}]
    return of.model.prepare(messages, tools=[], media=[], variables={})


def _asked(engine: Any, of: Specimen, messages: Sequence[dict[str, Any]]) -> Request:
    return _run(engine, of, of.model.prepare(messages, tools=[], media=[], variables={}))


def _run(engine: Any, of: Specimen, prompt: Prompt) -> Request:
    request = new_request(prompt.tokens, max_tokens=8, logprobs=5)
    request.prompt = prompt
    engine.submit(request)
    run(engine)
    return request


def _as_alone(of: Specimen, request: Request, *, what: str, cut: bool = False) -> None:
    twin = new_request(
        request.prompt.tokens,
        max_tokens=request.max_tokens,
        n=len(request.rows),
        params=request.params,
        min_tokens=request.min_tokens,
        stop_tokens=request.stop_tokens,
        logprobs=request.logprobs,
    )
    twin.prompt = request.prompt
    engine = new_engine(of.model, layout="solo", max_chunk=4096)
    engine.submit(twin)
    run(engine)
    for choice in range(len(request.rows)):
        found, alone = output_of(request, choice), output_of(twin, choice)
        if not cut:
            same(len(found.tokens), len(alone.tokens), f"{what}, a reply has other tokens")
        for at, pair in enumerate(zip(found.logprobs, alone.logprobs, strict=False)):
            if not _same_token(of, *pair, f"{what}, token {at} of a reply"):
                break


def _same_token(of: Specimen, found: TokenLogprob, alone: TokenLogprob, what: str) -> bool:
    """Whether they are equal. Raises `Nonconformity` unless rounding explains the difference."""
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


CHECKS: tuple[Check[Specimen], ...] = (
    Check("description", "Its `info` and its prompts are what the core relies on.", description),
    Check(
        "chunked prefill", "A prompt gives the same logits in chunks of any size.", chunked_prefill
    ),
    Check("one by one", "Decoded tokens give the same logits as those of a prompt.", one_by_one),
    Check("layouts", "Rows decode together in a layout that it offers.", layouts),
    Check(
        "company",
        "A request gets the tokens that it gets alone, whoever joins, leaves, is cancelled or "
        "fails beside it; in float32 the same ones, else any as likely.",
        company,
    ),
    Check(
        "prefix reuse",
        "What a prompt shares with one before it is found, and gives the same answer.",
        prefix_reuse,
    ),
    Check("images", "Images are told apart by their content, and reused by it.", images),
    Check(
        "reproducible",
        "In fixed passes, a request gives the same bits alone, in company and from the prefix "
        "cache.",
        reproducible,
    ),
)
"""Checks in every format."""

ONCE: tuple[Check[Specimen], ...] = (
    Check(
        "cancellation",
        "A cancelled request ends, touches nobody, and nothing of its rows is kept.",
        cancellation,
    ),
    Check(
        "faults",
        "A pass that fails, in its middle or at its end, touches no other request.",
        faults,
    ),
    Check(
        "control tokens",
        "No text of a user becomes a control token.",
        control_tokens,
    ),
    Check("bad input", "What is wrong with an input is told by an error of ours.", bad_input),
)
"""Checks in one format."""
