"""The checks of model families: description, errors, a row by itself, and requests in a batch. Each
is a function of one `Specimen`, and its docstring is the promise. `CHECKS` lists them."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ...engine.engine import Engine
from ...engine.prefix_cache.cache import PrefixCache
from ...engine.request import Request, SamplingParams
from ...isolation import Fault, attempt
from ...records import LoadedModel, LoadOptions, MediaItem, ModelFamily, Prompt
from ...serving import solo_rows
from ...serving.loader import equip
from ...serving.probe import Probe, probe
from .. import DEMO, HYBRID
from ..driver import Alternating, alone, new_engine, new_request, output_of, picture, prefill, run
from . import Case, Laboratory, NotApplicable, cases, checkpoint, demand, same

HARMLESS = 1e-3  # difference of a log-probability in float32 that is never an error
SYSTEM = "You look up weather. " * 8
QUESTION = "How is it in Paris? " * 8
LONG = 75  # tokens of a prompt that is longer than a tiny model's sliding window
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1.0, seed=11)
TOP = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5)


class Arrival(NamedTuple):
    """A request that joins a batch."""

    step: int  # of the engine, when it arrives
    length: int  # tokens of the prompt
    word: int  # prompts of the same word share their beginning
    max_tokens: int
    params: SamplingParams = GREEDY
    n: int = 1
    cancelled: int = -1  # step of its cancellation; -1: never


ARRIVALS = (
    Arrival(0, 75, 0, 20),
    Arrival(0, 7, 1, 30, DRAWN),
    Arrival(2, 140, 0, 9, TOP, n=2),
    Arrival(4, 40, 2, 30, cancelled=11),
    Arrival(5, 19, 2, 25, SamplingParams(temperature=0, repetition_penalty=1.3)),
    Arrival(9, 75, 1, 12, TOP),
    Arrival(9, 1, 3, 30, DRAWN),
    Arrival(14, 140, 0, 16),
)


@dataclass
class Specimen:
    """One checkpoint of a family, in float32, where tokens must be equal. `folder()`: its path."""

    family: ModelFamily
    folder: Callable[[], Path]
    lab: Laboratory

    def load(self, dtype: str) -> LoadedModel:
        return self.family.load(self.folder(), LoadOptions(dtype=dtype))

    @cached_property
    def model(self) -> LoadedModel:
        """The model in float32, with the kernels of the engine."""
        model = self.load("float32")
        equip(model, self.lab.registry)
        return model

    @cached_property
    def probe(self) -> Probe:
        """The layout that an engine would choose, and the noise of this device."""
        return probe(self.model, self.model.make_cache, self.model.kv_layouts)

    def tokens(self, length: int, word: int) -> list[int]:
        """Token ids without stop tokens. Those of one `word` begin equally."""
        return solo_rows.some_tokens(self.model, length, word)

    def ask(self, *messages: dict[str, Any], media: Sequence[MediaItem] = ()) -> Prompt:
        """The prompt of these messages."""
        return self.model.prepare(messages, tools=[], media=media, variables={})

    def system(self) -> list[dict[str, Any]]:
        """The messages before a user's: a system message, if the model takes one."""
        return [{"role": "system", "content": SYSTEM}] if self.model.info.system_role else []


def user(words: str, *, sees: bool = False) -> dict[str, Any]:
    """A user's message. `sees`: it begins with an image."""
    parts = [{"type": "image"}, {"type": "text", "text": words}]
    return {"role": "user", "content": parts if sees else words}


def description(of: Specimen) -> None:
    """Its `info` and its prompts are what the core relies on."""
    info, prompt = of.model.info, of.ask(user(QUESTION))
    same(info.precision, "float32", "info.precision of weights in float32")
    demand(info.context_length > 0, "info.context_length is no number of tokens")
    demand(info.weights_bytes > 0, "info.weights_bytes is no number of bytes")
    odd = [t for t in info.stop_tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"stop tokens {odd} are beyond the vocabulary of {info.vocab_size}")
    logits, _ = prefill(of.model, Prompt(of.tokens(3, 0)))
    same(logits.shape, (info.vocab_size,), "the shape of logits, where info.vocab_size is told")
    size, points = len(prompt.tokens), list(prompt.snapshot_points)
    demand(size > 0, "a prompt of its template has no tokens")
    odd = [t for t in prompt.tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"tokens {odd[:9]} of a prompt are beyond the vocabulary")
    demand(points == sorted(points), f"snapshot_points {points} do not ascend")
    demand(all(0 < p <= size for p in points), f"snapshot_points {points} lie outside")
    text, tokenizer = "The weather in Paris: 22 degrees, ça va.", of.model.tokenizer
    again = tokenizer.decode(tokenizer.encode(text, special=False))
    same(again, text, "text read back from tokens")
    other = of.load("bfloat16").info
    same(other.precision, "low", "info.precision of weights in bfloat16")
    demand(info.fingerprint != other.fingerprint, "info.fingerprint is the same for other weights")


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
    empty, weights = of.lab.folder(), shutil.ignore_patterns("*.safetensors")
    shutil.copytree(of.folder(), empty, ignore=weights, dirs_exist_ok=True)
    loading = partial(of.family.load, empty, LoadOptions())
    _demand_own_error("loading a folder without weights", loading, must=True)
    said, answer = user("a"), {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "c"}
    result = {"role": "tool", "content": "22", "tool_call_id": "x"}
    three = ([said, system, said], [said, result], [system])
    for turns in ([said, said], [answer, said], [said, answer], *three):
        _demand_own_error(f"messages {turns}", partial(of.ask, *turns))
    if "image" not in of.model.info.media:
        image = partial(of.ask, user("x", sees=True), media=[picture(1)])
        _demand_own_error("an image for a model that cannot see", image, must=True)


def _demand_own_error(what: str, run_it: Callable[[], object], *, must: bool = False) -> None:
    """`run_it` may raise errors of `mlx_provider.errors` only. `must`: it must raise one."""
    found = attempt(run_it)
    if not isinstance(found, Fault):
        demand(not must, f"{what} raises nothing")
        return
    summary = f"{what} raises no error of mlx_provider.errors: {found.summary}"
    demand(found.deliberate, summary)


def chunked_prefill(of: Specimen) -> None:
    """A prompt gives the same logits in chunks of any size."""
    prompt = Prompt(of.tokens(LONG, 3))
    whole, _ = prefill(of.model, prompt)
    for size in (1, 7, 32):
        found, _ = prefill(of.model, prompt, chunk=size)
        _demand_near(whole, found, f"in chunks of {size}")


def one_by_one(of: Specimen) -> None:
    """Decoded tokens give the same logits as those of a prompt."""
    tokens, first = of.tokens(LONG, 4), LONG - 8
    whole, _ = prefill(of.model, Prompt(tokens))
    _, cache = prefill(of.model, Prompt(tokens[:first]))
    logits = solo_rows.decode_each(of.model, cache, tokens[first:], first)[-1]
    _demand_near(whole, logits, "decoded one by one")


def _demand_near(expected: mx.array, found: mx.array, how: str) -> None:
    apart = solo_rows.spread(expected, found)
    summary = f"{how}, log-probabilities differ by {apart:.3g} from those of the prompt at once"
    demand(apart <= HARMLESS, summary)


def layouts(of: Specimen) -> None:
    """Rows decode together in a layout that it offers."""
    if next(iter(of.model.kv_layouts)) == "solo":
        raise NotApplicable("its kv_layouts offer no layout in which rows share a pass")
    demand(of.probe.layout != "solo", f"rows do not decode together: {'; '.join(of.probe.notes)}")


def company(of: Specimen) -> None:
    """A request gets the tokens that it gets alone, whoever joins, leaves or is cancelled."""
    stored = PrefixCache(budget=lambda: 2**22)
    twins = [alone(of.model, _make_request(of, arrival)) for arrival in ARRIVALS]
    # the last round finds the prefixes that the second one has stored
    for chunk, prefixes in ((16, None), (32, stored), (64, stored)):
        engine = new_engine(
            of.model, layout=of.probe.layout, mixes=of.probe.mixes, scheduler=Alternating,
            max_chunk=chunk, prefix_cache=prefixes,
        )  # fmt: skip
        requests = [_make_request(of, arrival) for arrival in ARRIVALS]
        for step in range(max(arrival.step for arrival in ARRIVALS) + 1):
            for arrival, request in zip(ARRIVALS, requests, strict=True):
                if arrival.step == step:
                    engine.submit(request)
                if arrival.cancelled == step:
                    engine.cancel(request)
            engine.step()
        run(engine)
        what = f"in the company of {len(ARRIVALS) - 1} others"
        for arrival, request, twin in zip(ARRIVALS, requests, twins, strict=True):
            _demand_equal(of, request, twin, what, cut=arrival.cancelled >= 0)


def _make_request(of: Specimen, arrival: Arrival) -> Request:
    points = [point for point in (70, 136) if point < arrival.length]
    prompt = Prompt(of.tokens(arrival.length, arrival.word), snapshot_points=points)
    fields = {"max_tokens": arrival.max_tokens, "n": arrival.n, "logprobs": 5}
    return new_request(prompt, params=replace(arrival.params), **fields)


def prefix_reuse(of: Specimen) -> None:
    """What a prompt shares with one before it is found, and gives the same answer."""
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26), max_chunk=64)
    turns = [*of.system(), user(QUESTION)]
    later = [*turns, {"role": "assistant", "content": "Sunny."}, user("And Rome?")]
    cold, repeat, after, _ = (
        _answer(of, engine, of.ask(*messages), "with what other prompts stored")
        for messages in (turns, turns, later, [*of.system(), user("Who are you?")])
    )
    same(cold.cached_tokens, 0, "tokens of a first prompt that were found in an empty cache")
    demand(
        2 * repeat.cached_tokens >= len(repeat.prompt.tokens),
        f"of {len(repeat.prompt.tokens)} tokens asked again only {repeat.cached_tokens} are found: "
        "Prompt.snapshot_points say where state is kept, the cache's classes what can be cut",
    )
    demand(after.cached_tokens > 0, "the next turn finds nothing of the turn before")


def images(of: Specimen) -> None:
    """Images are told apart by their content, and reused by it."""
    if "image" not in of.model.info.media:
        raise NotApplicable("its models take text only")

    def image(seed: int, words: str = "who") -> Prompt:
        return of.ask(*of.system(), user(words, sees=True), media=[picture(seed)])

    for prompt in (image(1), image(2)):
        same(len(prompt.spans), 1, "spans of a prompt with one image")
        span = prompt.spans[0]
        inside = 0 <= span.start < span.end <= len(prompt.tokens)
        demand(inside, f"the span {span.start}..{span.end} lies outside of the prompt")
    one, other, again = (image(seed).spans[0].content_hash for seed in (1, 2, 1))
    demand(one != other, "two images have one content_hash: one is answered for the other")
    same(again, one, "content_hash of the same image")
    engine = new_engine(of.model, prefix_cache=PrefixCache(budget=lambda: 2**26))
    _, question, third, _ = (
        _answer(of, engine, prompt, "with an image, from the prefix cache")
        for prompt in (image(1, "what is this " * 12), image(1), image(2), image(1))
    )
    end, begin = question.prompt.spans[0].end, third.prompt.spans[0].start
    summary = f"another question on an image finds {question.cached_tokens} tokens of the {end}"
    demand(question.cached_tokens >= end, f"{summary} up to its end")
    summary = f"another image finds {third.cached_tokens} tokens, beyond its beginning"
    demand(third.cached_tokens <= begin, summary)


def _answer(of: Specimen, engine: Engine, prompt: Prompt, what: str) -> Request:
    """Run a request and return it. Its reply must have the tokens that it has alone."""
    request = new_request(prompt, max_tokens=8, logprobs=5)
    engine.submit(request)
    run(engine)
    _demand_equal(of, request, alone(of.model, request), what)
    return request


def _demand_equal(
    of: Specimen, request: Request, twin: Request, what: str, *, cut: bool = False
) -> None:
    """Both must have equal tokens and log-probabilities. `cut`: `request` was cancelled, so its
    replies may be shorter."""
    bound = max(HARMLESS, solo_rows.MULTIPLE * of.probe.noise_floor)
    for choice in range(len(request.rows)):
        found, own = output_of(request, choice), output_of(twin, choice)
        wanted = own.tokens[: len(found.tokens)] if cut else own.tokens
        same(found.tokens, wanted, f"{what}, a reply has other tokens than alone")
        for one, other in zip(found.logprobs, own.logprobs, strict=False):
            apart = abs((one.logprob or 0.0) - (other.logprob or 0.0))
            summary = f"{what}, a token has another log-probability than alone, by {apart:.3g}"
            demand(apart <= bound, f"{summary}, where rounding explains {bound:.3g}")


CHECKS = (
    *(description, chunked_prefill, one_by_one, layouts, company, prefix_reuse, images),
    *(control_tokens, bad_input),
)


def cases_of(families: Iterable[ModelFamily], lab: Laboratory) -> Iterator[Case]:
    """The checks of each family on each of its checkpoints: those of the author's hook, or else the
    demo models that it serves. Without any, one failing case says so."""
    for family in families:
        subject = f"model family {family.name}"
        writers = lab.builders(family.name)
        folders: dict[str, Callable[[], Path]] = {
            label: cache(partial(lab.write_folder, write)) for label, write in writers.items()
        }
        for demo in (DEMO, HYBRID) if not writers else ():
            if family.matches(json.loads((demo / "config.json").read_text("utf-8"))):
                folders[f"demo {demo.name}"] = partial(Path, demo)
        if not folders:
            yield from cases(subject, "", (checkpoint,), partial(str, family.name))
        for label, folder in folders.items():
            specimen = cache(partial(Specimen, family, folder, lab))
            yield from cases(subject, label, CHECKS, specimen)
