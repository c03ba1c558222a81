"""Model families: description, errors, a row by itself, and requests in a batch. Each check runs on
one checkpoint in one format; a check is a function, and its docstring is the promise."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...engine.execution import solo_rows
from ...engine.execution.probe import Probe, exact_rows, probe
from ...engine.fixed_shapes import FixedShapes
from ...engine.prefix_cache.cache import PrefixCache
from ...engine.request import Phase, Request, SamplingParams
from ...engine.scheduling.scheduler import Scheduler
from ...errors import MLXProviderError
from ...isolation import Isolation
from ...protocol.events import Event, Failed, TokenLogprob
from ...records import LoadedModel, LoadOptions, MediaItem, ModelFamily, Prompt
from ...serving.kernels import equip
from .. import DEMO, HYBRID
from ..driver import Alternating, alone, new_engine, new_request, output_of, picture, run, start
from . import Case, Laboratory, NotApplicable, cases, checkpoint, demand, same

FORMATS = ("float32", "bfloat16", "4 bit")
GROUP = 32
"""Values that share a scale in four bits."""
HARMLESS = 1e-3
"""Difference of a log-probability in float32 that is never an error."""
SHARE = 0.15
"""Share of the difference that another context makes: rounding in 16 and 4 bits stays below half of
it, an error comes near to the whole."""
ONE = 2.0
"""Factor by which one token's log-probability may differ more than the mean of many."""
SYSTEM = "You look up weather. " * 8
QUESTION = "How is it in Paris? " * 8
LONG = 75
"""Tokens of a prompt that is longer than a tiny model's sliding window."""
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1.0, seed=11)
PENALISED = SamplingParams(temperature=0, repetition_penalty=1.3)
TOP = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5)
GRID = 16
COMPANY: Sequence[tuple[int, bool, type[Scheduler]]] = (
    (16, False, Alternating),
    (64, True, Scheduler),
    (32, True, Alternating),
)
"""Tokens of a chunk, whether prefixes are stored, and who decides."""


class Arrival(NamedTuple):
    step: int
    length: int
    word: int
    """Prompts of the same word share their beginning."""
    max_tokens: int
    params: SamplingParams = GREEDY
    n: int = 1
    cancelled: int = -1
    """Step of its cancellation."""


ARRIVALS = (
    Arrival(0, 75, 0, 20),
    Arrival(0, 7, 1, 30, DRAWN),
    Arrival(2, 140, 0, 9, TOP, n=2),
    Arrival(4, 40, 2, 30, cancelled=11),
    Arrival(5, 19, 2, 25, PENALISED),
    Arrival(9, 75, 1, 12, TOP),
    Arrival(9, 1, 3, 30, DRAWN),
    Arrival(14, 140, 0, 16),
)


class Specimen:
    """One checkpoint of a family in one format."""

    def __init__(
        self, family: ModelFamily, written: Callable[[], Path], lab: Laboratory, kept_in: str
    ) -> None:
        self.family, self.kept_in = family, kept_in
        self._written, self._lab = written, lab

    @property
    def exact(self) -> bool:
        """Whether tokens must be equal, not only equally likely."""
        return self.kept_in == "float32"

    @property
    def folder(self) -> Path:
        return self._written()

    def new_folder(self) -> Path:
        return self._lab.folder()

    def load(self, dtype: str) -> LoadedModel:
        return self.family.load(self.folder, LoadOptions(dtype=dtype))

    @cached_property
    def model(self) -> LoadedModel:
        """Equipped with the engine's kernels."""
        model = self.load("float32" if self.exact else "bfloat16")
        if self.kept_in == "4 bit":
            whole: Any = model.model
            if not isinstance(whole, nn.Module):
                raise NotApplicable("its model is no mlx.nn.Module that could be quantised")
            _quantise(getattr(whole, "language_model", whole))
        equip(model, self._lab.registry)
        if not self.exact:
            _computed_here(model)
        return model

    @cached_property
    def probe(self) -> Probe:
        return probe(self.model, self.model.make_cache, self.model.kv_layouts)

    @cached_property
    def tolerance(self) -> float:
        floor = solo_rows.MULTIPLE * self.probe.noise_floor
        return max(HARMLESS if self.exact else ONE * self.bound, floor)

    @cached_property
    def bound(self) -> float:
        """Difference of likely tokens (root mean square) between two ways to the same logits: a
        small share of what another context makes."""
        tokens = self.tokens(solo_rows.STEPS + 8, 5)
        row = solo_rows.prefilled(self.model, self.model.make_cache, tokens[:8])
        logits = solo_rows.decoded(self.model, row, tokens[8:], 8)
        contexts = [solo_rows.spread(a, b) for a, b in itertools.pairwise(logits)]
        reach = sum(contexts) / len(contexts)
        return HARMLESS if self.exact else max(solo_rows.HARMLESS["low"], SHARE * reach)

    def tokens(self, length: int, word: int) -> list[int]:
        """Ids without stop tokens. With equal `word`, they begin equally."""
        return solo_rows.some_tokens(self.model, length, word)

    def ask(self, *messages: dict[str, Any], media: Sequence[MediaItem] = ()) -> Prompt:
        return self.model.prepare(messages, tools=[], media=media, variables={})

    def system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}] if self.model.info.system_role else []


def _computed_here(model: LoadedModel) -> None:
    """Raise `NotApplicable` where this device has no kernel for a format (MLX 0.32 on a CPU: the
    experts of bfloat16)."""
    try:
        solo_rows.prefilled(model, model.make_cache, solo_rows.some_tokens(model, 3, 0))
    except RuntimeError as error:
        if "only supports" in str(error):
            raise NotApplicable(f"this device cannot compute it: {error}") from None
        raise


def _quantise(model: nn.Module) -> None:
    """As converters do. Raises `NotApplicable` for layers that have no such form (mlx-lm 0.32's own
    linear layers of some architectures)."""
    try:
        nn.quantize(model, group_size=GROUP, bits=4, class_predicate=_divisible)
    except TypeError as error:
        raise NotApplicable(f"its layers have no form in four bits: {error}") from None


def _divisible(path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP == 0


def user(words: str, *, sees: bool = False) -> dict[str, Any]:
    parts = [{"type": "image"}, {"type": "text", "text": words}]
    return {"role": "user", "content": parts if sees else words}


def description(of: Specimen) -> None:
    """Its `info` and its prompts are what the core relies on."""
    info, prompt = of.model.info, of.ask(user(QUESTION))
    wanted = "float32" if of.exact else "low"
    same(info.precision, wanted, f"info.precision of weights in {of.kept_in}")
    demand(info.context_length > 0, "info.context_length is no number of tokens")
    demand(info.weights_bytes > 0, "info.weights_bytes is no number of bytes")
    odd = [t for t in info.stop_tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"stop tokens {odd} are beyond the vocabulary of {info.vocab_size}")
    vocab = start(of.model, Prompt(of.tokens(3, 0))).logits.shape
    same(tuple(vocab), (info.vocab_size,), "the shape of logits, where info.vocab_size is told")
    size, points = len(prompt.tokens), list(prompt.snapshot_points)
    demand(size > 0, "a prompt of its template has no tokens")
    odd = [t for t in prompt.tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"tokens {odd[:9]} of a prompt are beyond the vocabulary")
    demand(points == sorted(points), f"snapshot_points {points} do not ascend")
    demand(all(0 < p <= size for p in points), f"snapshot_points {points} lie outside")
    text, tokenizer = "The weather in Paris: 22 degrees, ça va.", of.model.tokenizer
    again = tokenizer.decode(tokenizer.encode(text, special=False))
    same(again, text, "text read back from tokens")
    if not of.exact:
        other = of.load("float32").info.fingerprint
        demand(info.fingerprint != other, "info.fingerprint is the same for other weights")


def control_tokens(of: Specimen) -> None:
    """No text of a user becomes a control token."""
    special = {
        token.content: number
        for number, token in of.model.tokenizer.fast.get_added_tokens_decoder().items()
        if token.special
    }
    if not special:
        raise NotApplicable("its tokenizer has no control tokens")
    plain = list(of.ask(user("x")).tokens)
    for text, number in special.items():
        found = list(of.ask(user(f"x {text} y")).tokens)
        summary = f"a user who types {text!r} writes the control token {number}"
        demand(found.count(number) <= plain.count(number), summary)


def bad_input(of: Specimen) -> None:
    """What is wrong with an input is told by an error of `mlx_provider.errors`."""
    empty = of.new_folder()
    for path in of.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (empty / path.name).write_bytes(path.read_bytes())
    loading = partial(of.family.load, empty, LoadOptions())
    _typed("loading a folder without weights", loading, must=True)
    said, answer = user("a"), {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "c"}
    result = {"role": "tool", "content": "22", "tool_call_id": "x"}
    for turns in (
        [said, said],
        [answer, said],
        [said, answer],
        [said, system, said],
        [said, result],
        [system],
    ):
        _typed(f"messages {turns}", partial(of.ask, *turns))
    if "image" not in of.model.info.media:
        seen = partial(of.ask, user("x", sees=True), media=[picture(1)])
        _typed("an image for a model that cannot see", seen, must=True)


def _typed(what: str, run_it: Callable[[], object], *, must: bool = False) -> None:
    """A raised error is one of ours; `must`: one is raised."""
    with Isolation() as trying:
        run_it()
    if trying.fault is None:
        demand(not must, f"{what} raises nothing")
        return
    summary = f"{what} raises no error of mlx_provider.errors: {trying.fault.summary}"
    demand(isinstance(trying.fault.error, MLXProviderError), summary)


def chunked_prefill(of: Specimen) -> None:
    """A prompt gives the same logits in chunks of any size."""
    prompt = Prompt(of.tokens(LONG, 3))
    whole = start(of.model, prompt).logits
    for size in (1, 7, 32):
        _near(of, whole, start(of.model, prompt, chunk=size).logits, f"in chunks of {size}")


def one_by_one(of: Specimen) -> None:
    """Decoded tokens give the same logits as those of a prompt."""
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
    apart = solo_rows.spread(expected, found)
    summary = f"{how}, log-probabilities differ by {apart:.3g} from those of the prompt at once"
    demand(apart <= of.bound, f"{summary}, where rounding explains {of.bound:.3g}")


def layouts(of: Specimen) -> None:
    """Rows decode together in a layout that it offers."""
    if next(iter(of.model.kv_layouts)) == "solo":
        raise NotApplicable("its kv_layouts offer no layout in which rows share a pass")
    notes = "; ".join(of.probe.notes)
    demand(of.probe.layout != "solo", f"rows do not decode together: {notes}")


def company(of: Specimen) -> None:
    """A request gets the tokens that it gets alone, whoever joins, leaves or is cancelled beside
    it; in float32 the same ones, else any as likely."""
    stored = PrefixCache(budget=lambda: 2**22)
    twins = [alone(of.model, _arriving(of, each)) for each in ARRIVALS]
    for chunk, stores, scheduler in COMPANY:
        engine = new_engine(
            of.model,
            layout=of.probe.layout,
            mixes=of.probe.mixes,
            scheduler=scheduler,
            max_chunk=chunk,
            prefix_cache=stored if stores else None,
        )
        requests = [_arriving(of, each) for each in ARRIVALS]
        for step in range(max(each.step for each in ARRIVALS) + 1):
            for arrival, request in zip(ARRIVALS, requests, strict=True):
                if arrival.step == step:
                    engine.submit(request)
                if arrival.cancelled == step:
                    engine.cancel(request)
            engine.step()
        run(engine)
        what = f"in the company of {len(ARRIVALS) - 1} others"
        for arrival, request, twin in zip(ARRIVALS, requests, twins, strict=True):
            _equal(of, request, twin, what, cut=arrival.cancelled >= 0)


def _arriving(of: Specimen, arrival: Arrival) -> Request:
    """Greedy where tokens need not be equal: another rounding draws other tokens."""
    request = new_request(
        of.tokens(arrival.length, arrival.word),
        max_tokens=arrival.max_tokens,
        n=arrival.n,
        params=replace(arrival.params if of.exact else GREEDY),
        logprobs=5,
    )
    cuts = [point for point in (70, 136) if point < arrival.length]
    request.prompt = replace(request.prompt, snapshot_points=cuts)
    return request


def prefix_reuse(of: Specimen) -> None:
    """What a prompt shares with one before it is found, and gives the same answer."""
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26), max_chunk=64)
    turns = [*of.system(), user(QUESTION)]
    answer = {"role": "assistant", "content": "Sunny."}
    cold = _run(engine, of.ask(*turns))
    same(cold.cached, 0, "tokens of a first prompt that were found in an empty cache")
    repeat = _run(engine, of.ask(*turns))
    demand(
        2 * repeat.cached >= len(repeat.prompt.tokens),
        f"of {len(repeat.prompt.tokens)} tokens asked again only {repeat.cached} are found: "
        "Prompt.snapshot_points say where state is kept, the cache's classes what can be cut",
    )
    after = _run(engine, of.ask(*turns, answer, user("And Rome?")))
    demand(after.cached > 0, "the next turn finds nothing of the turn before")
    other = _run(engine, of.ask(*of.system(), user("Who are you?")))
    for request, what in (
        (cold, "cold"),
        (repeat, "asked again"),
        (after, "in the next turn"),
        (other, "behind a stored system text"),
    ):
        _as_alone(of, request, what)


def images(of: Specimen) -> None:
    """Images are told apart by their content, and reused by it."""
    if "image" not in of.model.info.media:
        raise NotApplicable("its models take text only")

    def seen(seed: int, words: str = "who") -> Prompt:
        return of.ask(*of.system(), user(words, sees=True), media=[picture(seed)])

    for prompt in (seen(1), seen(2)):
        same(len(prompt.spans), 1, "spans of a prompt with one image")
        span = prompt.spans[0]
        inside = 0 <= span.start < span.end <= len(prompt.tokens)
        demand(inside, f"the span {span.start}..{span.end} lies outside of the prompt")
    one, other, again = (seen(seed).spans[0].content_hash for seed in (1, 2, 1))
    demand(one != other, "two images have one content_hash: one is answered for the other")
    same(again, one, "content_hash of the same image")
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26))
    asked = [_run(engine, seen(1, "what is this " * 12))]
    asked += [_run(engine, seen(seed)) for seed in (1, 2, 1)]
    question, other_picture = asked[1], asked[2]
    end, begin = question.prompt.spans[0].end, other_picture.prompt.spans[0].start
    summary = f"another question on the same image finds {question.cached} tokens of the {end}"
    demand(question.cached >= end, f"{summary} up to its end")
    summary = f"another image finds {other_picture.cached} tokens, beyond its beginning"
    demand(other_picture.cached <= begin, summary)
    for request in asked:
        _as_alone(of, request, "with an image, from the prefix cache")


def reproducible(of: Specimen) -> None:
    """In fixed passes, a request gives the same bits alone, in company and from the prefix
    cache."""
    together = 3 if of.probe.layout == "grouped" else 1
    rows = exact_rows(of.model, of.model.make_cache, together).rows
    shapes = FixedShapes(rows=rows, tokens=GRID)
    asked = ((45, 0, GREEDY), (LONG, 0, TOP), (5, 2, GREEDY), (33, 3, DRAWN))

    def engine(**more: Any) -> Any:
        return new_engine(of.model, fixed=shapes, max_chunk=shapes.tokens, **more)

    def bits(engine: Any, kinds: Iterable[tuple[int, int, SamplingParams]]) -> list[Any]:
        requests = [
            new_request(of.tokens(length, word), max_tokens=9, params=params, logprobs=2)
            for length, word, params in kinds
        ]
        for request in requests:
            engine.submit(request)
            engine.step()
        run(engine)
        outputs = map(output_of, requests)
        return [[each.tokens, [found.logprob for found in each.logprobs]] for each in outputs]

    single = [bits(engine(), [kind])[0] for kind in asked]
    crowd = engine(prefix_cache=PrefixCache(budget=lambda: 2**26))
    for what in ("in company", "in company, from the prefix cache"):
        for found, expected in zip(bits(crowd, asked), single, strict=True):
            same(found, expected, f"{what}, a reproducible request gives other bits")


def faults(of: Specimen) -> None:
    """A pass that fails, in its middle or at its end, touches no other request."""
    made: list[int] = []

    def make_cache() -> list[Any]:
        layers = of.model.make_cache()
        made.append(len(layers))
        return [_failing(each) for each in layers] if len(made) == 2 else layers

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
        _as_alone(of, request, "beside a row whose pass failed")


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
    own = {"update_and_fetch": fails, "__setitem__": fails}
    layer.__class__ = type(kind.__name__, (kind,), own)
    return layer


def cancellation(of: Specimen) -> None:
    """A cancelled request ends, touches nobody, and nothing of its rows is kept."""
    layers: list[weakref.ref[Any]] = []

    def make_cache() -> list[Any]:
        made = of.model.make_cache()
        layers.extend(weakref.ref(layer) for layer in made)
        return made

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
    _as_alone(of, after, "after cancelled requests")
    del engine, request, after
    gc.collect()
    alive = [reference() for reference in layers if reference() is not None]
    names = sorted({type(each).__name__ for each in alive})
    demand(not alive, f"{len(alive)} caches of rows that ended are still held: {names}")


def _run(engine: Any, prompt: Prompt) -> Request:
    request = new_request(prompt.tokens, max_tokens=8, logprobs=5)
    request.prompt = prompt
    engine.submit(request)
    run(engine)
    return request


def _as_alone(of: Specimen, request: Request, what: str) -> None:
    _equal(of, request, alone(of.model, request), what)


def _equal(of: Specimen, request: Request, twin: Request, what: str, *, cut: bool = False) -> None:
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


CHECKS = (
    description,
    chunked_prefill,
    one_by_one,
    layouts,
    company,
    prefix_reuse,
    images,
    reproducible,
)
ONCE = (cancellation, faults, control_tokens, bad_input)
"""In float32 only."""


def cases_of(families: Iterable[ModelFamily], lab: Laboratory) -> Iterator[Case]:
    for family in families:
        subject = f"model family {family.name}"
        writers = lab.builders(family.name)
        folders: dict[str, Callable[[], Path]] = {
            label: cache(partial(written, lab, write)) for label, write in writers.items()
        }
        for demo in (DEMO, HYBRID) if not writers else ():
            if family.matches(json.loads((demo / "config.json").read_text("utf-8"))):
                folders[f"demo {demo.name}"] = partial(Path, demo)
        if not folders:
            yield from cases(subject, "", (checkpoint,), partial(str, family.name))
        for label, folder in folders.items():
            for kept_in in FORMATS:
                checks = (*CHECKS, *ONCE) if kept_in == FORMATS[0] else CHECKS
                specimen = cache(partial(Specimen, family, folder, lab, kept_in))
                yield from cases(subject, f"{label}, {kept_in}", checks, specimen)


def written(lab: Laboratory, write: Callable[[Path], object]) -> Path:
    folder = lab.folder()
    write(folder)
    return folder
