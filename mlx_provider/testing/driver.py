"""An engine without threads, for tests: `new_engine` makes it, `new_request` a request, `run` steps
until all requests have ended, and `output_of` has their tokens. `alone` makes a reference."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import mlx.core as mx
import numpy as np

from ..engine.engine import Engine
from ..engine.prefix_cache.cache import PrefixCache
from ..engine.prefix_cache.policy import PrefixCachePolicy
from ..engine.request import Request, Row, SamplingParams
from ..engine.scheduling.chunking import FixedShapes
from ..engine.scheduling.costs import Costs
from ..engine.scheduling.ledger import Ledger, Limits, MemoryProfile
from ..engine.scheduling.scheduler import Scheduler
from ..engine.speculation.policy import Ask, Asks, Policy, RowAcceptance
from ..engine.step_output import Recorder
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, Event, FinishReason, TokenLogprob
from ..records import Features, LoadedModel, MediaItem, PrefillChunk, Prompt


@dataclass
class TokenOutput:
    """A row's output that keeps tokens and makes no text. `fails_at`: number of tokens after which
    `push` raises `ValueError`. `RowOutput` describes the methods."""

    stopped: str = ""
    reasoning_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fails_at: int | None = None

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        if self.fails_at == len(self.tokens):
            raise ValueError("broken output")
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


def new_request(
    prompt: Prompt | Sequence[int], *, max_tokens: int = 8, n: int = 1,
    params: SamplingParams | None = None, **more: Any,
) -> Request:  # fmt: skip
    """A request with `n` rows. `params`: greedy if unset. `more`: other fields of `Request`."""
    whole = prompt if isinstance(prompt, Prompt) else Prompt(list(prompt))
    params = params or SamplingParams(temperature=0)
    request = Request(f"r{uuid4().hex[:8]}", whole, params, max_tokens, EventQueue(), **more)
    request.rows = [Row(request, i, TokenOutput()) for i in range(n)]
    return request


def output_of(request: Request, choice: int = 0) -> TokenOutput:
    """The output of one row of a `new_request`."""
    output = request.rows[choice].output
    assert isinstance(output, TokenOutput)
    return output


class Alternating(Scheduler):
    """A scheduler without the rule that a brief prompt runs before rows decode."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        vars(self.chunking)["is_brief"] = lambda job: False


@dataclass(eq=False)
class TokenLedger(Ledger):
    """A ledger with one byte per token and nearly endless memory, unless `give` replaces that."""

    limits: Limits

    def row_bytes(self, tokens: int) -> int:
        return tokens

    def available(self) -> int:
        return 2**40

    def available_alone(self) -> int:
        return self.available()

    def reclaim(self, need: int) -> None:
        """There is nothing to unload."""

    def give(self, **methods: Callable[..., object]) -> Ledger:
        """Replace methods of this ledger, by name, and return it."""
        vars(self).update(methods)
        return self


def new_engine(
    model: LoadedModel, *, layout: str = "grouped", mixes: bool = False,
    scheduler: type[Scheduler] = Scheduler, costs: Costs | None = None, grid: int = 1,
    fixed: FixedShapes | None = None, max_chunk: int = 16, max_rows: int = 32, reserve: int = 64,
    row_bytes: Callable[[int], int] = lambda tokens: tokens,
    available: Callable[[], int] = lambda: 2**40,
    make_cache: Callable[[], list[Any]] | None = None,
    prefix_cache: PrefixCache | None = None, in_place: bool = True, min_shared: int | None = None,
    memory: MemoryProfile | None = None, **more: Any,
) -> Engine:  # fmt: skip
    """An engine that runs only in `step`. `max_chunk` is small so that prompts take several steps.
    `reserve`: output tokens for which a row must have room. `row_bytes`, `available`: methods of
    the ledger. `make_cache`: of the model if unset. `prefix_cache`: none if unset. For the others,
    see `Scheduler` (`costs`, `grid`, `fixed`), `PrefixCachePolicy` (`in_place`, `min_shared`,
    `memory`) and `Engine` (`more`, too)."""
    make_cache = make_cache or model.make_cache
    policy = None
    if prefix_cache is not None:
        policy = PrefixCachePolicy(
            prefix_cache, model, "", make_cache, in_place=in_place and fixed is None,
            min_shared=min_shared, memory=memory, shapes=fixed,
        )  # fmt: skip
    limits = Limits(max_rows, 1000, stall_target=0.1, max_chunk=max_chunk, output_reserve=reserve)
    ledger = TokenLedger(limits).give(row_bytes=row_bytes, available=available)
    return Engine(
        model, scheduler(ledger, costs, grid=grid, fixed=fixed, prefixes=policy), layout=layout,
        mixes=mixes, make_cache=make_cache, recorder=Recorder(), prefix_cache=policy, **more,
    )  # fmt: skip


def run(engine: Engine, *requests: Request, max_steps: int = 10_000) -> list[Event]:
    """Submit these requests and step until nothing is left to do. Returns every event in order.
    Raises `AssertionError` after `max_steps` steps."""
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    for _ in range(max_steps):
        if engine.idle:
            return events
        for request, posted in engine.step():
            request.events.put(posted)
            events += posted
    raise AssertionError(f"not idle after {max_steps} steps")


def alone(model: LoadedModel, request: Request, **more: Any) -> Request:
    """Run a copy of the request in an engine of its own, as a reference, and return that copy.
    `more`: arguments of `new_engine`."""
    copied = ("max_tokens", "params", "min_tokens", "stop_tokens", "logprobs")
    fields = {name: getattr(request, name) for name in copied}
    twin = new_request(request.prompt, n=len(request.rows), **fields)
    run(new_engine(model, layout="solo", max_chunk=4096, **more), twin)
    return twin


class Eager(Policy):
    """A policy that asks in each step another drafter for another number, at any cost."""

    turns = 0

    def __init__(self) -> None:
        super().__init__(beside_prompts=True)

    def choose(
        self, rows: Sequence[Sequence[RowAcceptance | None]], others: int, seconds: object
    ) -> list[Asks]:
        self.turns += 1
        asks = list[Asks]()
        for i, row in enumerate(rows):
            able = [source for source, rate in enumerate(row) if rate is not None]
            drafts = (self.turns + 3 * i) % (self.most + 1)
            asks.append((Ask(able[(self.turns + i) % len(able)], drafts),) if drafts else ())
        return asks


def prefill(
    model: LoadedModel, prompt: Prompt, *, chunk: int = 0,
    features: Mapping[str, Features] | None = None,
) -> tuple[mx.array, list[Any]]:  # fmt: skip
    """Prefill a prompt in chunks of `chunk` tokens (0: all at once). Returns the logits (vocab,)
    after its last token, and its cache. `features`: of its media by content hash, if known."""
    if features is None:
        features = {span.content_hash: model.embed(span) for span in prompt.spans}
    cache, length = model.make_cache(), len(prompt.tokens)
    for at in range(0, length, chunk or length):
        stop = min(at + (chunk or length), length)
        logits = model.prefill(PrefillChunk(prompt, at, stop, cache, features))
        mx.eval(logits)
    return logits, cache


def picture(seed: int, edge: int = 96) -> MediaItem:
    """A square image of `edge` pixels: 6 x 6 patches, each with one random colour."""
    patches = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    patch_of = np.arange(edge) * 6 // edge
    pixels = np.ascontiguousarray(patches[patch_of][:, patch_of])
    return MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
