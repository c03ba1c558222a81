"""Chooses at load the layout in which rows decode: the best one that gives a row the same logits as
alone.

Padding, merging and masks are where upstream's batching is silently wrong (10 of 64 mlx-lm families
under padded prefill). What does not reproduce solo logits on short prompts is not used: a layout,
chunks in the pass of rows, drafts, shared prefixes. The tolerance is measured, see `solo_rows`.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import mlx.core as mx

from ...errors import UnsupportedModel
from ...isolation import Fault, attempt
from ...protocol.event_queue import EventQueue
from ...records import LoadedModel, PrefillChunk, Prompt
from ...upstream.cache_classes import leaves
from ...upstream.shared_kv import FEW, SHAREABLE, divide
from ..request import Request, Row, RowOutput, SamplingParams
from ..row_cache import arrays, profile
from ..scheduling.ledger import MemoryProfile
from . import solo_rows
from .batch_layout import NO_DRAFTS, Layout, Widths
from .decode_batch import run_pass
from .grouped_kv import MixedChunk, can_share_a_pass
from .solo_rows import (
    CHUNK_ENDS,
    CHUNK_START,
    CHUNKED_LENGTH,
    STEPS,
    ByStep,
    MakeCache,
    SoloRow,
    timed_pass,
)

Reserve = Callable[[int], bool]
"""Reserves bytes, in place of those reserved before. Returns whether they are free."""
Results = Iterable[tuple[SoloRow, ByStep]]
"""Rows, and their logits in a pass with others."""
LENGTHS, ROPE_DELTAS = (5, 11, 270, 283), (0, 4, 9, 2)
"""Lengths of the test prompts: two groups with two rows each; and their rotary deltas, as of
images."""
DRAFTED = ((1, 2, 0, 1), (3, 1), (0, 1, 2))
"""For the first rows: the number of correct tokens in each pass, followed by `WRONG` wrong ones.
0: the row has one token, like others."""
WRONG = 2
CHUNK, SHARING_STEPS = FEW + 1, 2
"""Tokens of a chunk after a shared prefix, which sees that and its own tokens in one product, and
those that rows decode after it."""
APART = 1
"""The step before which one row of each group leaves. It rejoins after the step."""
ROWS = 15
"""Caches of the longest row that are in memory together, at most."""
NO_ROOM = "too little memory is free to try them together"
ALONE = f"rows decode alone: {NO_ROOM}"
NOT_USED = {
    "mixed": "chunks run in forward passes of their own",
    "drafted": "nothing is drafted",
    "shared": "rows share no prefix",
}
OPTIONAL = {"shared", "padded"}
"""Not tried again if they fail."""
KINDS = ((11, 0), (270, 9))
"""Prompt lengths of the tested rows, with their rotary deltas."""
REPEATED = (256, 512, 535)
"""Ends of the passes of the prompt that is computed twice. Its last pass is short, and it decodes
beyond 512 places: with such shapes, one prompt gave two texts on an H100."""
ROWS_ALONE = "each row decodes in a pass of its own"


@dataclass(frozen=True)
class Probe:
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
        return "padded" if self.padded else self.layout


@dataclass(frozen=True)
class Judgement:
    problem: str = ""
    """Why they may not run together. Empty: they may."""
    widest: float = 0.0
    """Largest difference of a likely token's log-probability from the row alone, if they may."""
    failed: bool = False


def unlimited(nbytes: int) -> bool:
    return True


def probe(
    model: LoadedModel,
    make_cache: MakeCache,
    layouts: Sequence[str],
    reserve: Reserve = unlimited,
) -> Probe:
    """Test `layouts`, best first, on the engine thread. `solo` needs no test. `reserve`: if it
    returns `False` for the memory of the passes, none is run."""
    prompts = [solo_rows.some_tokens(model, length, i) for i, length in enumerate(LENGTHS)]
    together = list(itertools.takewhile(lambda name: name != "solo", layouts))
    room = has_room(model, make_cache, LENGTHS[-1] + STEPS, reserve)
    if not room or not together:
        longest = solo_rows.prefilled(model, make_cache, prompts[-1])
        return Probe("solo", profile(longest), () if room else (ALONE,), conclusive=room)
    rows = [
        solo_rows.decoding(model, make_cache, tokens, delta)
        for tokens, delta in zip(prompts, ROPE_DELTAS, strict=True)
    ]
    judged: dict[str, Judgement] = {}
    for name in together:
        judged[name] = _judge(partial(_together, model, rows, name))
        if not judged[name].problem:
            break
    if name == "grouped" and not judged[name].problem and can_share_a_pass(rows[-1].cache):
        for kind, run in _trials(model, make_cache, rows).items():
            judged[kind] = _judge(run)
    passed = {kind for kind, each in judged.items() if not each.problem}
    return Probe(
        name if name in passed else "solo",
        profile(rows[-1].cache),
        tuple(
            f"{NOT_USED.get(kind, f'layout {kind!r} is not used')}: {each.problem}"
            for kind, each in judged.items()
            if each.problem and kind != "padded"
        ),
        mixes="mixed" in passed,
        noise_floor=max(each.widest for each in judged.values()),
        conclusive=not any(judged[kind].failed for kind in judged.keys() - OPTIONAL),
        drafts="drafted" in passed,
        shares="shared" in passed,
        padded="padded" in passed,
    )


def has_room(model: LoadedModel, make_cache: MakeCache, tokens: int, reserve: Reserve) -> bool:
    """Reserve the memory of a trial, if it is free. `tokens`: of its longest row."""
    _, one = timed_pass(model, first := make_cache(), 0, 1)
    return reserve(ROWS * profile(first).row_bytes(tokens) + one * tokens)


def _trials(
    model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]
) -> dict[str, Callable[[], Results]]:
    found: dict[str, Callable[[], Results]] = {
        "mixed": partial(_run_mixed, model, make_cache, rows),
        "drafted": partial(_run_drafted, model, rows),
    }
    if any(type(each) in SHAREABLE for each in leaves(rows[-1].cache)):
        found["shared"] = partial(_run_shared, model, make_cache, rows)
    if mx.default_device() == mx.gpu:  # a CPU has no launches that it could save
        found["padded"] = partial(_together, model, rows, "padded")
    return found


def _judge(run: Callable[[], Results]) -> Judgement:
    """Compare rows together with the same rows alone. Never raises."""
    found = attempt(lambda: _compare(run()))
    if isinstance(found, Fault):
        return Judgement(found.summary, failed=not isinstance(found.error, UnsupportedModel))
    return found


def _compare(results: Results) -> Judgement:
    pairs = list(results)
    problems = [problem for row, found in pairs if (problem := row.problem(found))]
    widest = max(row.widest(found) for row, found in pairs)
    return Judgement(problems[0]) if problems else Judgement(widest=widest)


def _together(model: LoadedModel, rows: Sequence[SoloRow], name: str) -> Results:
    """One row of each group decodes apart for one step."""
    layout, apart = Layout(name), Layout("solo")
    found = _run_joined(layout, rows)
    leave = list(found)[1::2]
    for step in range(STEPS):
        if step == APART:
            _move(leave, layout, apart)
        if step == APART + 1:
            _move(leave, apart, layout)
        one_step(model, layout, found)
        one_step(model, apart, found)
    return zip(rows, found.values(), strict=True)


def _run_mixed(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> Results:
    """The rows in passes with chunks of one more prompt, and its row."""
    tokens = solo_rows.some_tokens(model, CHUNKED_LENGTH, len(rows))
    chunked = solo_rows.chunked(model, make_cache, tokens)
    layout = Layout("grouped")
    found = _run_joined(layout, rows)
    cache, after, start = deepcopy(chunked.cache), [], CHUNK_START
    for stop in CHUNK_ENDS:
        chunk = MixedChunk(tokens[start:stop], range(start, stop), cache)
        after.append(one_step(model, layout, found, chunk)[-1])
        start = stop
    after += solo_rows.decoded(model, cache, tokens[start:], start)
    return zip([*rows, chunked], [*found.values(), after], strict=True)


def _run_shared(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> Results:
    """The first row, and the last one twice, with a shared prefix."""
    tokens = rows[-1].tokens
    start = len(tokens) - CHUNK
    cache = solo_rows.prefilled(model, make_cache, tokens[:start])
    for layer in leaves(cache):
        if type(layer) in SHAREABLE:
            divide(layer, start // 2)
    model.prefill(PrefillChunk(Prompt(tokens), start, len(tokens), cache))
    mx.eval(arrays(cache))
    twin = replace(rows[-1], cache=cache)
    rows, layout = [rows[0], twin, twin], Layout("grouped")
    found = _run_joined(layout, rows)
    for _ in range(SHARING_STEPS):
        one_step(model, layout, found)
    return zip(rows, found.values(), strict=True)


def _run_drafted(model: LoadedModel, rows: Sequence[SoloRow]) -> Results:
    """Some rows have several tokens in a pass, of which the last are wrong."""
    layout = Layout("grouped")
    found = _run_joined(layout, rows)
    drafting = list(found)[: len(DRAFTED)]
    for step in range(max(map(len, DRAFTED))):
        kept = {
            row: own[step]
            for row, own in zip(drafting, DRAFTED, strict=True)
            if step < len(own) and own[step]
        }
        one_step(model, layout, found, kept=kept)
    return zip(rows, (each[:STEPS] for each in found.values()), strict=True)


def _run_joined(layout: Layout, rows: Sequence[SoloRow]) -> dict[Row, list[mx.array]]:
    found: dict[Row, list[mx.array]] = {}
    for each in rows:
        row = stand_in(each.tokens, each.rope_delta)
        layout.add(row, deepcopy(each.cache))
        found[row] = []
    return found


def _move(rows: Sequence[Row], layout: Layout, other: Layout) -> None:
    for row in rows:
        other.add(row, layout.extract(row))
    layout.drop(rows)


def one_step(
    model: LoadedModel,
    layout: Layout,
    found: Mapping[Row, list[mx.array]],
    chunk: MixedChunk | None = None,
    kept: Widths = NO_DRAFTS,
    wrong: int = WRONG,
) -> mx.array:
    """One token for each row of the layout. Returns logits (B, vocab) of the last pass. `kept`:
    rows with so many correct tokens, which stay, and `wrong` ones behind them."""
    logits = mx.array([])
    widths = {row: max(2, count + wrong) for row, count in kept.items()}
    for each in layout.passes(chunk, widths):
        tokens: list[int] = []
        at: list[int] = []
        starts: dict[Row, int] = {}
        for row in (*each.rows, *each.drafting):
            starts[row] = len(tokens)
            right = row.request.prompt.tokens[len(row.tokens) :][: kept.get(row, 1)]
            tokens += [*right, *([right[-1]] * (widths.get(row, 1) - len(right)))]
            first = row.length + row.request.prompt.rope_delta
            at += range(first, first + widths.get(row, 1))
        logits = run_pass(model, each, mx.array(tokens, dtype=mx.int32), at).logits
        mx.eval(logits)
        for row, start in starts.items():
            stay = kept.get(row, 1)
            found[row].extend(logits[start + i] for i in range(stay))
            row.tokens += row.request.prompt.tokens[len(row.tokens) :][:stay]
            if row in widths:
                layout.keep(row, stay)
    return logits


def stand_in(tokens: list[int], delta: int) -> Row:
    """A row without output."""
    prompt, no_text = Prompt(tokens, rope_delta=delta), cast("RowOutput", None)
    request = Request("probe", prompt, SamplingParams(), STEPS + 1, EventQueue())
    request.rows.append(row := Row(request, 0, no_text))
    return row


# -- passes of a reproducible model


@dataclass(frozen=True)
class Exact:
    rows: int
    """Rows of every pass."""
    note: str = ""
    """Why there are fewer rows than requested."""
    steady: bool = True
    """Whether one prompt, computed twice alone, gave the same bits."""


def exact_rows(
    model: LoadedModel, make_cache: MakeCache, wanted: int, reserve: Reserve = unlimited
) -> Exact:
    """`wanted` rows, or one, if kernels of the device treat places differently, or the model does
    not accept rows with separate caches. Runs on the engine thread. Never raises. `reserve`: if it
    returns `False` for the memory of the passes, none is run."""
    found = attempt(lambda: _exact_rows(model, make_cache, wanted, reserve))
    return found if isinstance(found, Exact) else Exact(1, note=f"{ROWS_ALONE}: {found.summary}")


def _exact_rows(model: LoadedModel, make_cache: MakeCache, wanted: int, reserve: Reserve) -> Exact:
    if not has_room(model, make_cache, REPEATED[-1] + STEPS, reserve):
        return Exact(1, note=f"{ROWS_ALONE}: {NO_ROOM}")
    if not _steady(model, make_cache):
        return Exact(1, steady=False)
    if wanted == 1:
        return Exact(1)
    rows = [
        solo_rows.decoding(model, make_cache, solo_rows.some_tokens(model, *kind), kind[1])
        for kind in KINDS
    ]
    problem = _inexact(model, rows, wanted)
    return Exact(1, note=f"{ROWS_ALONE}: {problem}") if problem else Exact(wanted)


def _steady(model: LoadedModel, make_cache: MakeCache) -> bool:
    ends = [n for n in REPEATED if n + STEPS <= model.info.context_length]
    tokens = solo_rows.some_tokens(model, ends[-1], 0) if ends else []
    first, second = (solo_rows.in_chunks(model, make_cache(), tokens, ends) for _ in range(2))
    return all(map(_equal, first, second))


def _inexact(model: LoadedModel, rows: Sequence[SoloRow], size: int) -> str:
    """Why rows must not share passes of this size. Empty: they may."""
    filled = [_run_fixed(model, [row], size)[0] for row in rows]
    wrong = next((p for row, own in zip(rows, filled, strict=True) if (p := row.problem(own))), "")
    if wrong:
        return wrong
    order = [i % len(rows) for i in range(size)]
    for several in (order, order[::-1]):
        found = _run_fixed(model, [rows[i] for i in several], size)
        for place, (i, own) in enumerate(zip(several, found, strict=True)):
            if not all(map(_equal, filled[i], own)):
                return f"at place {place} of {size} its logits differ from those alone"
    return ""


def _equal(some: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(some, other, equal_nan=True))


def _run_fixed(model: LoadedModel, rows: Sequence[SoloRow], size: int) -> list[ByStep]:
    layout = Layout("fixed", size)
    found = _run_joined(layout, rows)
    for _ in range(STEPS):
        one_step(model, layout, found)
    return list(found.values())
