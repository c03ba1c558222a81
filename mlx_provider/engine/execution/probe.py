"""Tests at load which layout gives a row the same logits as alone, and what a row costs.

Padding, merging and masks are where upstream's batching is silently wrong (10 of 64 mlx-lm families
under padded prefill). A layout that does not reproduce solo logits on four short prompts is not
used, and the reason is reported. The same applies to chunks in the pass of rows that decode. The
tolerance is measured, see `noise`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...protocol.event_queue import EventQueue
from ...records import LoadedModel, PrefillChunk, Prompt
from ...upstream.shared_kv import FEW, SHAREABLE, divide
from ..memory import MemoryProfile, arrays, leaves, profile
from ..request import Request, Row, RowOutput, SamplingParams
from . import solo_rows
from .batch_layout import Layout, make_layout
from .decode_batch import run_pass
from .deep_cache import Reserve, unlimited
from .mixed_chunk import MixedChunk, can_share_a_pass
from .probe_memory import NO_ROOM, has_room
from .solo_rows import CHUNK_ENDS, CHUNK_START, CHUNKED_LENGTH, STEPS, ByStep, MakeCache, SoloRow

LENGTHS = (5, 11, 270, 283)
"""Lengths of the test prompts: two groups with two rows each, all of different lengths."""
ROPE_DELTAS = (0, 4, 9, 2)
"""Rotary deltas of the rows, as images would cause them: each row must have its own position."""
DRAFTED = ((1, 2, 0, 1), (3, 1), (0, 1, 2))
"""For the first rows: the number of correct tokens in each pass, followed by wrong ones. 0: the row
has one token, like others."""
WRONG = 2
CHUNK = FEW + 1
"""Tokens of a chunk after a shared prefix, which sees that and its own tokens in one product."""
SHARING_STEPS = 2
"""Tokens that rows with a shared prefix decode."""
ALONE = f"rows decode alone: {NO_ROOM}"
APART = 1
"""The step before which one row of each group leaves. It rejoins after the step."""


@dataclass(frozen=True)
class Probe:
    """Result of the probe."""

    layout: str
    memory: MemoryProfile
    notes: tuple[str, ...]
    """Why a better layout is not used."""
    mixes: bool = False
    """Whether prompt chunks may share the pass of rows that decode."""
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability between a row in a batch and the same
    row alone, caused only by the device's rounding. 0 if rows decode alone."""
    conclusive: bool = True
    """Whether no layout was rejected because of a failure that may not occur again."""
    drafts: bool = False
    """Whether a row may have several tokens in one pass, of which the last are rejected."""
    shares: bool = False
    """Whether rows may attend to a prefix that is in memory once."""
    padded: bool = False
    """Whether rows of up to 2,048 tokens share a buffer whatever their lengths."""

    @property
    def decoding(self) -> str:
        """The layout in which rows decode."""
        return "padded" if self.padded else self.layout


def probe(
    model: LoadedModel,
    make_cache: MakeCache,
    layouts: Sequence[str],
    reserve: Reserve = unlimited,
) -> Probe:
    """Test `layouts`, best first, on the engine thread. `solo` needs no test.

    `reserve`: if it returns `False` for the memory of the passes, none is run.
    """
    prompts = [solo_rows.some_tokens(model, length, i) for i, length in enumerate(LENGTHS)]
    together = list(itertools.takewhile(lambda name: name != "solo", layouts))
    room = has_room(model, make_cache, LENGTHS[-1] + STEPS, reserve)
    if not room or not together:
        longest = solo_rows.prefilled(model, make_cache, prompts[-1])
        why = () if room else (ALONE,)
        return Probe("solo", profile(longest, LENGTHS[-1]), why, conclusive=room)
    rows = [
        solo_rows.decoding(model, make_cache, tokens, delta)
        for tokens, delta in zip(prompts, ROPE_DELTAS, strict=True)
    ]
    longest = rows[-1].cache
    memory = profile(longest, LENGTHS[-1])
    notes, failed = [], False
    for name in together:
        found = _judged(rows, partial(_together, model, rows, name))
        failed |= found.failed
        if found.problem:
            notes.append(f"layout {name!r} is not used: {found.problem}")
            continue
        more = GroupedPasses()
        if name == "grouped" and can_share_a_pass(longest):
            more = _grouped_passes(model, make_cache, rows)
        return Probe(
            name,
            memory,
            (*notes, *more.notes),
            more.mixed.passed,
            max(each.widest for each in (found, *more.all)),
            conclusive=not (failed or more.mixed.failed or more.drafted.failed),
            drafts=more.drafted.passed,
            shares=more.shared.passed,
            padded=more.padded.passed,
        )
    return Probe("solo", memory, tuple(notes), conclusive=not failed)


@dataclass(frozen=True)
class Judgement:
    """Result of rows that ran together."""

    passed: bool
    problem: str = ""
    """Why they may not run together. Empty: they may."""
    widest: float = 0.0
    """Largest difference of a likely token's log-probability from the row alone, if they may."""
    failed: bool = False
    """The run failed."""


UNTRIED = Judgement(False)


@dataclass(frozen=True)
class GroupedPasses:
    """Results of the passes that only the grouped layout has."""

    mixed: Judgement = UNTRIED
    drafted: Judgement = UNTRIED
    shared: Judgement = UNTRIED
    padded: Judgement = UNTRIED

    @property
    def all(self) -> Sequence[Judgement]:
        return self.mixed, self.drafted, self.shared, self.padded

    @property
    def notes(self) -> Iterator[str]:
        """The passes that are not used, with the reason."""
        if self.mixed.problem:
            yield f"chunks run in forward passes of their own: {self.mixed.problem}"
        if self.drafted.problem:
            yield f"nothing is drafted: {self.drafted.problem}"
        if self.shared.problem:
            yield f"rows share no prefix: {self.shared.problem}"


def _grouped_passes(
    model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]
) -> GroupedPasses:
    mixed = _mixing(model, make_cache, rows)
    drafted = _judged(rows, partial(_drafted, model, rows))
    padded = UNTRIED
    if mx.default_device() == mx.gpu:  # a CPU has no launches that it could save
        padded = _judged(rows, partial(_together, model, rows, "padded"))
    if not any(type(each) in SHAREABLE for each in leaves(rows[-1].cache)):
        return GroupedPasses(mixed, drafted, padded=padded)
    twins = [rows[0], rows[-1], rows[-1]]
    run = partial(_shared, model, make_cache, twins)
    return GroupedPasses(mixed, drafted, _judged(twins, run), padded)


def _judged(rows: Sequence[SoloRow], run: Callable[[], Sequence[ByStep]]) -> Judgement:
    """Compare the result of `run`, by row, with the same rows alone. Never raises."""
    with Isolation() as tried:
        pairs = list(zip(rows, run(), strict=True))
        problems = [problem for row, found in pairs if (problem := row.problem(found))]
        widest = max(row.widest(found) for row, found in pairs)
    if tried.fault is not None:
        return Judgement(False, tried.fault.summary, failed=True)
    return Judgement(False, problems[0]) if problems else Judgement(True, widest=widest)


def _mixing(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> Judgement:
    """Whether chunks of one more prompt may share the passes of `rows`."""
    with Isolation() as tried:
        tokens = solo_rows.some_tokens(model, CHUNKED_LENGTH, len(rows))
        chunked = solo_rows.chunked(model, make_cache, tokens)
    if tried.fault is not None:
        return Judgement(False, tried.fault.summary, failed=True)
    return _judged([*rows, chunked], partial(_mixed, model, rows, chunked))


def _together(model: LoadedModel, rows: Sequence[SoloRow], name: str) -> list[ByStep]:
    """Logits of the rows in a layout. One row of each group decodes apart for one step."""
    layout, apart = make_layout(name), make_layout("solo")
    found = _joined(layout, rows)
    leave = list(found)[1::2]
    for step in range(STEPS):
        if step == APART:
            _move(leave, layout, apart)
        if step == APART + 1:
            _move(leave, apart, layout)
        one_step(model, layout, found)
        one_step(model, apart, found)
    return list(found.values())


def _mixed(model: LoadedModel, rows: Sequence[SoloRow], chunked: SoloRow) -> list[ByStep]:
    """Logits of the rows in passes with chunks, and those of the chunks' row."""
    layout = make_layout("grouped")
    found = _joined(layout, rows)
    cache, after, start = deepcopy(chunked.cache), [], CHUNK_START
    for stop in CHUNK_ENDS:
        tokens = chunked.tokens[start:stop]
        chunk = MixedChunk(tokens, range(start, stop), cache)
        after.append(one_step(model, layout, found, chunk)[-1])
        start = stop
    after += solo_rows.decoded(model, cache, chunked.tokens[start:], start)
    return [*found.values(), after]


def _shared(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> list[ByStep]:
    """Logits of the rows, of which the last two are equal and share a prefix."""
    tokens = rows[-1].tokens
    start = len(tokens) - CHUNK
    cache = solo_rows.prefilled(model, make_cache, tokens[:start])
    for layer in leaves(cache):
        if type(layer) in SHAREABLE:
            divide(layer, start // 2)
    model.prefill(PrefillChunk(Prompt(tokens), start, len(tokens), cache))
    mx.eval(arrays(cache))
    layout, found = make_layout("grouped"), dict[Row, list[mx.array]]()
    for each, own in zip(rows, (rows[0].cache, cache, cache), strict=True):
        delta = ROPE_DELTAS[0 if each is rows[0] else -1]
        row = stand_in(each.tokens, delta)
        layout.add(row, deepcopy(own))
        found[row] = []
    for _ in range(SHARING_STEPS):
        one_step(model, layout, found)
    return list(found.values())


def _drafted(model: LoadedModel, rows: Sequence[SoloRow]) -> list[ByStep]:
    """Logits of the rows if some have several tokens in a pass, of which the last are wrong."""
    layout = make_layout("grouped")
    found = _joined(layout, rows)
    drafting = list(found)[: len(DRAFTED)]
    for step in range(max(map(len, DRAFTED))):
        kept = {
            row: own[step]
            for row, own in zip(drafting, DRAFTED, strict=True)
            if step < len(own) and own[step]
        }
        _draft(model, layout, found, kept)
    return [each[:STEPS] for each in found.values()]


def _draft(
    model: LoadedModel,
    layout: Layout,
    found: Mapping[Row, list[mx.array]],
    kept: Mapping[Row, int],
) -> None:
    """One pass. The first tokens of the drafting rows are correct, and stay."""
    widths = {row: max(2, count + WRONG) for row, count in kept.items()}
    (each,) = layout.passes(widths=widths)
    tokens: list[int] = []
    at: list[int] = []
    for row in [*each.rows, *each.drafting]:
        count = widths.get(row, 1)
        right = list(row.request.prompt.tokens[len(row.tokens) :][: kept.get(row, 1)])
        tokens += [*right, *(right[-1:] * (count - len(right)))]
        first = row.length + row.request.prompt.rope_delta
        at += range(first, first + count)
    logits = run_pass(model, each, mx.array(tokens, dtype=mx.int32), at).logits
    mx.eval(logits)
    start = 0
    for row in [*each.rows, *each.drafting]:
        stay = kept.get(row, 1)
        found[row] += [logits[start + i] for i in range(stay)]
        row.tokens += row.request.prompt.tokens[len(row.tokens) :][:stay]
        layout.keep(row, stay)
        start += widths.get(row, 1)


def _joined(layout: Layout, rows: Sequence[SoloRow]) -> dict[Row, list[mx.array]]:
    """Add the rows to a layout. Returns each row with its logits so far."""
    found: dict[Row, list[mx.array]] = {}
    for each, delta in zip(rows, ROPE_DELTAS, strict=True):
        row = stand_in(each.tokens, delta)
        layout.add(row, deepcopy(each.cache))
        found[row] = []
    return found


def _move(rows: Sequence[Row], layout: Layout, other: Layout) -> None:
    """Move rows to another layout."""
    for row in rows:
        other.add(row, layout.extract(row))
    layout.drop(rows)


def one_step(
    model: LoadedModel,
    layout: Layout,
    found: Mapping[Row, list[mx.array]],
    chunk: MixedChunk | None = None,
) -> mx.array:
    """One token for each row of the layout. Returns logits (B, vocab) of the last pass."""
    logits = mx.array([])
    for each in layout.passes(chunk):
        tokens = [row.request.prompt.tokens[len(row.tokens)] for row in each.rows]
        at = [row.length + row.request.prompt.rope_delta for row in each.rows]
        logits = run_pass(model, each, mx.array(tokens, dtype=mx.int32), at).logits
        mx.eval(logits)
        for i, (row, token) in enumerate(zip(each.rows, tokens, strict=True)):
            found[row].append(logits[i])
            row.tokens.append(token)
    return logits


def stand_in(tokens: list[int], delta: int) -> Row:
    """A row of a synthetic request."""
    prompt = Prompt(tokens, rope_delta=delta)
    request = Request("probe", prompt, SamplingParams(), STEPS + 1, EventQueue())
    row = Row(request, 0, _NO_TEXT)
    request.rows.append(row)
    return row


class _NoText:
    """Output for rows whose text is not needed."""

    stopped = ""
    reasoning_tokens = 0

    def push(self, token: int, logprob: Any = None) -> list[Any]:
        return []

    def finish(self, reason: Any) -> tuple[list[Any], Any]:
        return [], reason


_NO_TEXT: RowOutput = _NoText()
