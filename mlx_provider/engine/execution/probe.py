"""At load time: which layout gives a row the same logits as alone, and what a row costs.

Padding, merging and masks are where upstream's batching goes silently wrong (10 of 64 mlx-lm
families under padded prefill). A layout that does not reproduce solo logits on three short
prompts is not used, and the reason is told. The same holds for chunks of a prompt that are mixed
into the pass of rows that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...protocol.event_queue import EventQueue
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import MemoryProfile, arrays, profile
from ..request import Request, Row, RowOutput, SamplingParams
from .batch_layout import Layout, make_layout
from .decode_batch import run_pass
from .piggyback import PiggybackedChunk, can_share_a_pass

log = logging.getLogger(__name__)

LENGTHS = (5, 11, 270)
"""Two prompts that share a group, and one that needs its own."""
ROPE_DELTAS = (0, 4, 9)
"""Their rotary deltas, as images would leave them: each row's position must be its own."""
STEPS = 3
CHUNKS = (5, 7)
"""Sizes of the piggybacked chunks: a second one must find what the first one left."""
TOLERANCE = {"float32": 1e-3, "low": 0.25}
"""Largest difference of log-probabilities among the likely tokens."""
LIKELY = 16


@dataclass(frozen=True)
class Probe:
    """What the probe found."""

    layout: str
    memory: MemoryProfile
    notes: tuple[str, ...]
    """Why a better layout is not used."""
    mixes: bool = False
    """Whether chunks of prompts may share the pass of rows that decode."""


def probe(model: LoadedModel, make_cache: Callable[[], list[Any]], layouts: Sequence[str]) -> Probe:
    """Try `layouts`, best first, on the engine thread; `solo` needs no proof."""
    prompts = [_tokens(model, length, start) for start, length in enumerate(LENGTHS)]
    longest = _prefilled(model, make_cache, prompts[-1])
    memory = profile(longest, len(prompts[-1]))
    solo = _run(model, make_cache, make_layout("solo"), prompts)
    notes = []
    for name in layouts:
        if name == "solo":
            break
        with Isolation() as tried:
            found = _run(model, make_cache, make_layout(name), prompts)
            worst = max(_distance(a, b) for a, b in zip(solo, found, strict=True))
        if tried.fault is not None:
            notes.append(f"layout {name!r} is not used: {tried.fault.told}")
            continue
        if worst <= TOLERANCE[model.info.precision]:
            mixes = name == "grouped" and can_share_a_pass(longest)
            if mixes and (problem := _mixed_problem(model, make_cache, prompts, solo)):
                mixes = False
                notes.append(f"chunks run in forward passes of their own: {problem}")
            return Probe(name, memory, tuple(notes), mixes)
        notes.append(f"layout {name!r} is not used: logprobs differ from solo by {worst:.3g}")
    return Probe("solo", memory, tuple(notes))


def _tokens(model: LoadedModel, length: int, start: int) -> list[int]:
    """Ids spread over the vocabulary, without those that end a reply."""
    usable = max(2, model.info.vocab_size)
    ids = ((7919 * (i + 1) + 104729 * start) % usable for i in range(2 * length))
    return [i for i in ids if i not in model.info.stop_tokens][:length]


def _prefilled(
    model: LoadedModel, make_cache: Callable[[], list[Any]], tokens: list[int]
) -> list[Any]:
    cache = make_cache()
    model.prefill(PrefillChunk(Prompt(tokens), 0, len(tokens), cache))
    mx.eval(arrays(cache))
    return cache


def _run(
    model: LoadedModel,
    make_cache: Callable[[], list[Any]],
    layout: Layout,
    prompts: Sequence[list[int]],
) -> list[mx.array]:
    """Logits of every prompt after fixed tokens; the second leaves and comes back on the way."""
    rows = [_row(tokens, d) for tokens, d in zip(prompts, ROPE_DELTAS, strict=True)]
    for row in rows:
        layout.add(row, _prefilled(model, make_cache, list(row.request.prompt.tokens)))
    out: list[mx.array] = []
    for step in range(STEPS):
        if step == STEPS - 1:
            leaver = rows[1]
            cache = layout.extract(leaver)
            layout.drop([leaver])
            layout.add(leaver, cache)
        out += _step(model, layout, rows, step)
    return out


def _mixed_problem(
    model: LoadedModel,
    make_cache: Callable[[], list[Any]],
    prompts: Sequence[list[int]],
    solo: Sequence[mx.array],
) -> str:
    """Why the last prompt may not be prefilled in the passes of the others; empty: it may."""
    *others, tokens = prompts
    layout = make_layout("grouped")
    rows = [_row(t, d) for t, d in zip(others, ROPE_DELTAS, strict=False)]
    for row in rows:
        layout.add(row, _prefilled(model, make_cache, list(row.request.prompt.tokens)))
    start = len(tokens) - sum(CHUNKS)
    mixed, apart = (_prefilled(model, make_cache, tokens[:start]) for _ in range(2))
    worst = 0.0
    with Isolation() as tried:
        for step, count in enumerate(CHUNKS):
            stop = start + count
            chunk = PiggybackedChunk(tokens[start:stop], range(start, stop), mixed)
            *found, after = _step(model, layout, rows, step, chunk)
            expected = model.prefill(PrefillChunk(Prompt(tokens), start, stop, apart))
            wanted = [*solo[step * len(prompts) :][: len(rows)], expected]
            pairs = zip([*found, after], wanted, strict=True)
            worst = max(worst, *(_distance(b, a) for a, b in pairs))
            start = stop
    if tried.fault is not None:
        return tried.fault.told
    return "" if worst <= TOLERANCE[model.info.precision] else f"logprobs differ by {worst:.3g}"


def _step(
    model: LoadedModel,
    layout: Layout,
    rows: list[Row],
    step: int,
    chunk: PiggybackedChunk | None = None,
) -> list[mx.array]:
    """Logits (vocab,) of every row, then those after the chunk."""
    found: dict[Row, mx.array] = {}
    after: list[mx.array] = []
    for each in layout.passes(chunk):
        tokens = [row.request.prompt.tokens[step] for row in each.rows]
        at = [row.length + row.request.prompt.rope_delta for row in each.rows]
        logits = run_pass(model, each, mx.array(tokens, dtype=mx.int32), at)
        mx.eval(logits)
        found |= {row: logits[i] for i, row in enumerate(each.rows)}
        if each.chunk is not None:
            after.append(logits[-1])
    for row in rows:
        row.tokens.append(row.request.prompt.tokens[step])
    return [*(found[row] for row in rows), *after]


def _distance(a: mx.array, b: mx.array) -> float:
    """Largest log-probability difference among the tokens likely by `a`."""
    first, second = (x.astype(mx.float32) - mx.logsumexp(x.astype(mx.float32)) for x in (a, b))
    likely = mx.argpartition(-first, min(LIKELY, first.size) - 1)[:LIKELY]
    worst: float = mx.max(mx.abs(first[likely] - second[likely])).item()  # type: ignore[assignment]
    return worst if worst == worst else float("inf")


def _row(tokens: list[int], delta: int) -> Row:
    prompt = Prompt(tokens, rope_delta=delta)
    request = Request("probe", prompt, SamplingParams(), STEPS + 1, EventQueue())
    row = Row(request, 0, _NO_TEXT)
    request.rows.append(row)
    return row


class _NoText:
    """Output of rows whose text nobody reads."""

    stopped = False
    reasoning_tokens = 0

    def push(self, token: int, logprob: Any = None) -> list[Any]:
        return []

    def finish(self, reason: Any) -> tuple[list[Any], Any]:
        return [], reason


_NO_TEXT: RowOutput = _NoText()
