"""Chooses at load the layout in which rows decode: the best one that gives a row the same logits as
alone.

Padding, merging and masks are where upstream's batching is silently wrong (10 of 64 mlx-lm families
under padded prefill). What does not reproduce solo logits on short prompts is not used: a layout,
chunks in the pass of rows, drafts, shared prefixes. The tolerance is measured, see `solo_rows`."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import mlx.core as mx

from ..engine.execution.batch_layout import NO_WIDTHS, Layout, Widths
from ..engine.execution.decode_batch import run_pass
from ..engine.execution.grouped_kv import MixedChunk, can_share_a_pass
from ..engine.execution.sampler import Drawn, draw
from ..engine.request import Request, Row, RowOutput, SamplingParams
from ..engine.row_cache import profile
from ..engine.scheduling.ledger import MemoryProfile
from ..errors import UnsupportedModel
from ..isolation import Fault, attempt
from ..protocol.event_queue import EventQueue
from ..records import LoadedModel, Prompt
from ..upstream.cache_classes import layers_of
from ..upstream.shared_kv import FEW, SHAREABLE, divide
from . import solo_rows
from .solo_rows import CHUNKS, STEPS, ByStep, MakeCache, SoloRow, timed_pass

Reserve = Callable[[int], bool]
"""Reserves bytes, in place of those reserved before. Returns whether they are free."""
Results = Iterable[tuple[SoloRow, ByStep]]
"""Rows, and their logits in a pass with others."""
LENGTHS, ROPE_DELTAS = (5, 11, 270, 283), (0, 4, 9, 2)
"""Lengths of the test prompts, two in each of two groups; their rotary deltas, as of images."""
DRAFTED, WRONG = ((1, 3, 0), (2, 1, 1), (0, 0, 2), (1, 0, 0)), 2
"""In each pass: the correct tokens of each of the first rows, which `WRONG` wrong ones follow. 0:
the row has one token, like the rows after these."""
CHUNK, SHARING_STEPS = FEW + 1, 2
"""Tokens of a chunk after a shared prefix, enough to read prefix and own tokens in one product;
tokens that rows decode after the chunk."""
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
"""If these raise, the probe still counts as conclusive: they are not tried again."""


@dataclass(frozen=True)
class Probe:
    layout: str
    memory: MemoryProfile
    notes: tuple[str, ...]  # why a better layout is not used
    mixes: bool = False  # whether prompt chunks may share the pass of rows that decode
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability between a row in a batch and the same
    row alone, caused only by the device's rounding. 0 if rows decode alone."""
    conclusive: bool = True
    """Whether no layout was rejected because of a failure that may not occur again."""
    drafts: bool = False
    """Whether a row may have several tokens in one pass, of which the last are rejected."""
    shares: bool = False  # whether rows may attend to a prefix that is in memory once
    padded: bool = False
    """Whether rows of up to 2,048 tokens may share a buffer whatever their lengths."""


@dataclass(frozen=True)
class Judgement:
    problem: str = ""
    """Why rows may not run together in this way. Empty: they may."""
    widest: float = 0.0
    """Largest difference of a likely token's log-probability from the row alone, if they may."""
    failed: bool = False  # whether the trial raised an error that may not occur again


def unlimited(nbytes: int) -> bool:
    """A `Reserve` without a limit."""
    return True


def probe(
    model: LoadedModel, make_cache: MakeCache, layouts: Sequence[str], reserve: Reserve = unlimited
) -> Probe:
    """Test `layouts`, best first, on the engine thread. `solo` needs no test. `reserve`: if it
    returns `False` for the memory of the passes, none is run."""
    prompts = [solo_rows.some_tokens(model, length, i) for i, length in enumerate(LENGTHS)]
    together = list(itertools.takewhile(lambda name: name != "solo", layouts))
    room = has_room(model, make_cache, LENGTHS[-1] + STEPS, reserve)
    if not room or not together:
        longest = solo_rows.prefill(model, make_cache(), prompts[-1])
        return Probe("solo", profile(longest), () if room else (ALONE,), conclusive=room)
    decode = partial(solo_rows.decoding_row, model, make_cache)
    rows = [decode(*prompt) for prompt in zip(prompts, ROPE_DELTAS, strict=True)]
    layout, judged = _judge_layouts(model, make_cache, rows, together)
    passed = {kind for kind, judgement in judged.items() if not judgement.problem}
    return Probe(
        layout,
        profile(rows[-1].cache),
        tuple(
            f"{NOT_USED.get(kind, f'layout {kind!r} is not used')}: {judgement.problem}"
            for kind, judgement in judged.items()
            if judgement.problem and kind != "padded"
        ),
        mixes="mixed" in passed,
        noise_floor=max(judgement.widest for judgement in judged.values()),
        conclusive=not any(judged[kind].failed for kind in judged.keys() - OPTIONAL),
        drafts="drafted" in passed,
        shares="shared" in passed,
        padded="padded" in passed,
    )


def has_room(model: LoadedModel, make_cache: MakeCache, tokens: int, reserve: Reserve) -> bool:
    """Reserve the memory of a trial, if it is free. `tokens`: of its longest row."""
    _, one = timed_pass(model, first := make_cache(), 0, 1)
    return reserve(ROWS * profile(first).row_bytes(tokens) + one * tokens)


def _judge_layouts(
    model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow], layouts: Sequence[str]
) -> tuple[str, dict[str, Judgement]]:
    """The first layout without a problem. And by name, the judgements of this one, of those before
    it, and of what the layout `grouped` allows."""
    judged: dict[str, Judgement] = {}
    for layout in layouts:
        judged[layout] = _judge(partial(_run_together, model, rows, layout))
        if not judged[layout].problem:
            break
    else:
        return "solo", judged
    if layout == "grouped" and can_share_a_pass(rows[-1].cache):
        judged["mixed"] = _judge(partial(_run_mixed, model, make_cache, rows))
        judged["drafted"] = _judge(partial(_run_drafted, model, rows))
        if any(type(layer) in SHAREABLE for layer in layers_of(rows[-1].cache)):
            judged["shared"] = _judge(partial(_run_shared, model, make_cache, rows))
        if mx.default_device() == mx.gpu:  # a CPU has no launches that it could save
            judged["padded"] = _judge(partial(_run_together, model, rows, "padded"))
    return layout, judged


def _judge(run: Callable[[], Results]) -> Judgement:
    """Compare rows together with the same rows alone. Never raises."""
    rows = attempt(lambda: [(row.problem(logits), row.widest(logits)) for row, logits in run()])
    if isinstance(rows, Fault):
        return Judgement(rows.summary, failed=not isinstance(rows.error, UnsupportedModel))
    problem = next((problem for problem, _ in rows if problem), "")
    return Judgement(problem, 0.0 if problem else max(widest for _, widest in rows))


class Trial:
    """Collects logits (vocab,) of rows in a layout, step by step. Rows in `apart` run alone."""

    def __init__(
        self, model: LoadedModel, layout: str, rows: Sequence[SoloRow] = (), size: int = 0
    ) -> None:
        self._model = model
        self.layout, self.apart = Layout(layout, size), Layout("solo")
        self.logits: dict[Row, list[mx.array]] = {}
        for row in rows:
            self.add(row.tokens, deepcopy(row.cache), row.rope_delta)

    def add(self, tokens: list[int], cache: list[Any], rope_delta: int = 0) -> None:
        """Add a row with `tokens` in its cache. Its steps run these again, from the first on."""
        prompt, no_text = Prompt(tokens, rope_delta=rope_delta), cast("RowOutput", None)
        request = Request("probe", prompt, SamplingParams(), STEPS + 1, EventQueue())
        request.rows.append(row := Row(request, 0, no_text))
        self.layout.add(row, cache)
        self.logits[row] = []

    def step(
        self, chunk: MixedChunk | None = None, kept: Widths = NO_WIDTHS, wrong: int = WRONG
    ) -> mx.array:
        """Run one token of each row, and `chunk`. Returns logits (tokens, vocab) of the last pass.
        `kept`: rows that run so many correct tokens, which stay, and then `wrong` wrong ones."""
        logits = mx.array([])
        widths = {row: count + wrong for row, count in kept.items()}
        for forward in (*self.layout.passes(chunk, widths), *self.apart.passes()):
            tokens, at, starts = list[int](), list[int](), dict[Row, int]()
            for row in (*forward.rows, *forward.drafting):
                width, starts[row] = widths.get(row, 1), len(tokens)
                right = row.request.prompt.tokens[len(row.tokens) :][: kept.get(row, 1)]
                tokens += [*right, *([right[-1]] * (width - len(right)))]
                first = row.length + row.request.prompt.rope_delta
                at += range(first, first + width)
            logits = run_pass(self._model, forward, mx.array(tokens, dtype=mx.int32), at).logits
            mx.eval(logits)
            for row, start in starts.items():
                stay = kept.get(row, 1)
                self.logits[row].extend(logits[start : start + stay])
                row.tokens += tokens[start : start + stay]
                self.layout.keep_tokens(row, stay)
        return logits

    def draw(self, logits: mx.array, params: SamplingParams) -> Drawn:
        """A token for each row from logits (rows, vocab), with log-probabilities."""
        for row in self.logits:
            row.request.params, row.request.logprobs = params, 1
        return draw(logits, [*self.logits], [None] * len(self.logits))

    def run(self, steps: int) -> list[ByStep]:
        """Run so many steps. Returns the logits of each row in all steps so far."""
        for _ in range(steps):
            self.step()
        return [*self.logits.values()]


def _run_together(model: LoadedModel, rows: Sequence[SoloRow], name: str) -> Results:
    """One row of each group decodes apart in the second step."""
    trial = Trial(model, name, rows)
    both = [trial.layout, trial.apart]
    trial.run(1)
    for layout, other in (both, both[::-1]):
        leave = list(trial.logits)[1::2]
        for row in leave:
            other.add(row, layout.extract(row))
        layout.drop(leave)
        trial.run(1)
    return zip(rows, trial.run(STEPS - 3), strict=True)


def _run_mixed(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> Results:
    """The rows in passes with chunks of one more prompt, and its row."""
    tokens = solo_rows.some_tokens(model, CHUNKS[-1] + 2, len(rows))
    chunked = solo_rows.chunked_row(model, make_cache, tokens)
    trial = Trial(model, "grouped", rows)
    cache, after = deepcopy(chunked.cache), list[mx.array]()
    for start, stop in itertools.pairwise(CHUNKS):
        after.append(trial.step(MixedChunk(tokens[start:stop], range(start, stop), cache))[-1])
    after += solo_rows.decode_each(model, cache, tokens[stop:], stop)
    return zip([*rows, chunked], [*trial.logits.values(), after], strict=True)


def _run_shared(model: LoadedModel, make_cache: MakeCache, rows: Sequence[SoloRow]) -> Results:
    """The first row, and the last one twice, with a shared prefix. Its bound admits chunk noise."""
    last = rows[-1]
    tokens, start = last.tokens, len(last.tokens) - CHUNK
    cache = solo_rows.prefill(model, make_cache(), tokens[:start])
    unshared = solo_rows.prefill(model, deepcopy(cache), tokens, start)
    share_prefix(cache, start // 2)
    solo_rows.prefill(model, cache, tokens, start)
    others = [solo_rows.decode_each(model, unshared, tokens[:STEPS], len(tokens) + last.rope_delta)]
    bound = max(last.bound, solo_rows.rounding_bound(model, last.logits, others))
    rows = [rows[0], *[replace(last, cache=cache, bound=bound)] * 2]
    return zip(rows, Trial(model, "grouped", rows).run(SHARING_STEPS), strict=True)


def share_prefix(cache: Sequence[Any], tokens: int) -> None:
    """Let copies of a row's cache share its first tokens, if any."""
    for layer in layers_of(cache) if tokens else ():
        if type(layer) in SHAREABLE:
            divide(layer, tokens)


def _run_drafted(model: LoadedModel, rows: Sequence[SoloRow]) -> Results:
    """Some rows have several tokens in a pass, of which the last are wrong."""
    trial = Trial(model, "grouped", rows)
    for counts in DRAFTED:
        kept = zip(trial.logits, counts, strict=False)
        trial.step(kept={row: count for row, count in kept if count})
    return zip(rows, (logits[:STEPS] for logits in trial.logits.values()), strict=True)
