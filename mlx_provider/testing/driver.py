"""An engine without threads: submit requests, step it, read their tokens."""

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
    it raises."""

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
    prompt: Prompt | Sequence[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    params: SamplingParams | None = None,
    **more: Any,
) -> Request:
    request = Request(
        f"r{uuid4().hex[:8]}",
        prompt if isinstance(prompt, Prompt) else Prompt(list(prompt)),
        params or SamplingParams(temperature=0),
        max_tokens,
        EventQueue(),
        **more,
    )
    request.rows = [Row(request, i, TokenOutput()) for i in range(n)]
    return request


def output_of(request: Request, choice: int = 0) -> TokenOutput:
    output = request.rows[choice].output
    assert isinstance(output, TokenOutput)
    return output


class Alternating(Scheduler):
    """Without the rule that brief prompts run before rows decode."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        vars(self.chunking)["is_brief"] = lambda job: False


@dataclass(eq=False)
class TokenLedger(Ledger):
    """One byte per token, and memory without end, unless `give` says something else."""

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
        """Replace methods."""
        vars(self).update(methods)
        return self


def new_engine(
    model: LoadedModel,
    *,
    layout: str = "grouped",
    mixes: bool = False,
    scheduler: type[Scheduler] = Scheduler,
    costs: Costs | None = None,
    grid: int = 1,
    fixed: FixedShapes | None = None,
    max_chunk: int = 16,
    max_rows: int = 32,
    reserve: int = 64,
    row_bytes: Callable[[int], int] = lambda tokens: tokens,
    available: Callable[[], int] = lambda: 2**40,
    make_cache: Callable[[], list[Any]] | None = None,
    prefix_cache: PrefixCache | None = None,
    in_place: bool = True,
    min_shared: int | None = None,
    memory: MemoryProfile | None = None,
    **more: Any,
) -> Engine:
    """`max_chunk` is small so that prompts take several steps. `reserve`: output tokens for which a
    row must have room. `row_bytes`, `available`: methods of the ledger. For the others, see
    `Scheduler` (`costs`, `grid`, `fixed`), `Engine`, and `PrefixCachePolicy` (`in_place`,
    `min_shared`, `memory`)."""
    fresh = make_cache or model.make_cache
    policy = None
    if prefix_cache is not None:
        policy = PrefixCachePolicy(
            prefix_cache, model, "", fresh, in_place=in_place and fixed is None,
            min_shared=min_shared, memory=memory, shapes=fixed,
        )  # fmt: skip
    limits = Limits(max_rows, 1000, stall_target=0.1, max_chunk=max_chunk, output_reserve=reserve)
    ledger = TokenLedger(limits).give(row_bytes=row_bytes, available=available)
    return Engine(
        model,
        scheduler(ledger, costs, grid=grid, fixed=fixed, prefixes=policy),
        layout=layout,
        mixes=mixes,
        make_cache=fresh,
        recorder=Recorder(),
        prefix_cache=policy,
        **more,
    )


def run(engine: Engine, *requests: Request, max_steps: int = 10_000) -> list[Event]:
    """Submit these requests and step until nothing is left to do. Returns every event in order."""
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
    """Run the same request in an engine of its own, as a reference."""
    equal = ("max_tokens", "params", "min_tokens", "stop_tokens", "logprobs")
    wanted = {name: getattr(request, name) for name in equal}
    twin = new_request(request.prompt, n=len(request.rows), **wanted)
    run(new_engine(model, layout="solo", max_chunk=4096, **more), twin)
    return twin


class Eager(Policy):
    """Always wants drafts: at every step, another number from another drafter."""

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
    model: LoadedModel,
    prompt: Prompt,
    *,
    chunk: int = 0,
    features: Mapping[str, Features] | None = None,
) -> tuple[mx.array, list[Any]]:
    """Logits (vocab,) after a prompt, in chunks of so many tokens (0: at once); and its cache."""
    if features is None:
        features = {span.content_hash: model.embed(span) for span in prompt.spans}
    cache, length = model.make_cache(), len(prompt.tokens)
    for at in range(0, length, chunk or length):
        stop = min(at + (chunk or length), length)
        logits = model.prefill(PrefillChunk(prompt, at, stop, cache, features))
        mx.eval(logits)
    return logits, cache


def picture(seed: int, edge: int = 96) -> MediaItem:
    patches = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    at = np.arange(edge) * 6 // edge
    pixels = np.ascontiguousarray(patches[at][:, at])
    return MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
