"""The rows that decode: their passes, and their drawn tokens, which are read one step later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from ...isolation import CircuitBreaker, Fault, attempt
from ...records import DeviceTokens, HiddenStatesModel, LoadedModel
from ...upstream.batch_caches import RowCache
from ..request import Row
from ..scheduling.chunking import FixedShapes
from .batch_layout import Layout, Pass
from .grouped_kv import MixedBatches, MixedChunk, offsets
from .sampler import Drawn


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities from the raw logits, before sampling changes them."""

    drawn: float | None
    """Of the drawn token. `None`: the first token of a prompt has none."""
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the best tokens, best first


Read = tuple[Row, int, Logprob | None]
"""A token of a row that was read from the device. `None`: the request wants no logprobs."""


class PassResult(NamedTuple):
    row: Row
    drafts: int  # how many drafts it had in its pass
    reads: Sequence[Read]  # the next token, then one more for each accepted draft


Drafts = Mapping[Row, Sequence[int]]  # draft tokens behind the next token of each row
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass
class Forward:
    """The launched passes of a step: results on the device, and the rows whose pass failed."""

    rows: list[Row]
    """The row of each logit vector. A row with drafts appears once, then once per draft."""
    logits: mx.array | None  # (B, vocab). `None`: no pass of rows ran
    failed: list[tuple[list[Row], Fault]]  # rows of a failed pass, whose caches are corrupted
    took_chunk: bool = False
    chunk_logits: mx.array | None = None  # (vocab,) after the chunk, if it ends its prompt
    drafts: Drafts = field(default_factory=dict)
    hidden: mx.array | None = None  # (B, hidden), of the logits, if the drafter needs them
    chunk_hidden: mx.array | None = None  # (1, hidden), after the chunk, if it ends its prompt


class Pending(NamedTuple):
    """The next token that a row gives to the model: at index `at` of `drawn`."""

    drawn: Drawn
    at: int
    committed: bool  # whether the token was already read from the device
    drafts: Sequence[int] = ()  # drafts that its pass verifies, after it
    to_replay: int = 0  # number of the row's committed tokens after it, which run again one by one

    @classmethod
    def of(cls, row: Row, to_replay: int) -> Pending:
        """A committed token, with so many committed ones after it."""
        token = row.tokens[-1 - to_replay]
        return cls(Drawn(mx.array([token], dtype=mx.int32), None), 0, True, to_replay=to_replay)


class DecodeBatch:
    """Calls of a step: `forward` launches a pass of the pending tokens, `read` waits for them (the
    pass before drew them), `set_drawn` adds the next ones. With drafts, in this pass or the one
    before (`drafted_rows`): `catch_up` waits, `layout.keep_tokens` for each drafted row, `forward`,
    `set_drawn`."""

    def __init__(
        self,
        model: LoadedModel,
        layout: str,
        *,
        mixes: bool = False,
        fixed: FixedShapes | None = None,
        hidden_model: HiddenStatesModel | None = None,
    ) -> None:
        """`mixes`: whether passes may have a chunk. `fixed`: sizes of the layout `fixed`, which is
        then used in place of `layout`. `hidden_model`: the model, if hidden states are needed."""
        self.model = model
        self._hidden_model = hidden_model
        self._best = layout if fixed is None else "fixed"
        self.layout = Layout(self._best, 0 if fixed is None else fixed.rows)
        self.mixed = MixedBatches(mixes and fixed is None)
        self._together = CircuitBreaker(
            "batched decoding failed %d times: rows decode alone now",
            f"rows decode together again, with layout {self._best}",
        )
        self._pending: dict[Row, Pending] = {}

    @property
    def can_verify_drafts(self) -> bool:
        return self._together.closed and self.layout.one_pass

    @property
    def decodes_apart(self) -> bool:
        """Whether failures have switched off all that rows do together."""
        return not self._together.closed

    @property
    def mixes(self) -> bool:
        """Whether a pass may have a chunk now."""
        return self._together.closed and self.mixed.allowed

    def record_success(self, rows: int) -> None:
        """A pass of so many rows worked. Rows that decode alone may decode together again."""
        self.mixed.record_success()
        if self._together.record_success(used=rows > 1):
            self.layout.use(self._best)

    def record_failure(self) -> None:
        """A pass failed. Its prompts start again. If no chunk shared it, rows may decode alone."""
        if self.mixed.restart_prompts() or self._best == "fixed":
            return
        if self._together.record_failure():
            self.layout.use("solo")

    def join(self, row: Row, cache: list[Any], cached: int) -> None:
        """Add a row with the first `cached` of its tokens in `cache`. The rest run one by one."""
        self.layout.add(row, cache)
        self._pending[row] = Pending.of(row, row.length_to_cache - cached - 1)

    def replays(self, row: Row) -> bool:
        """After `read`: whether the row's next token is a committed one, which runs again."""
        return row in self._pending

    def drop(self, rows: Sequence[Row]) -> None:
        if rows:
            self.layout.drop(rows)
        for row in rows:
            self._pending.pop(row, None)

    def forward(self, chunk: MixedChunk | None = None, drafts: Drafts = NO_DRAFTS) -> Forward:
        """Launch the model on the pending token of every row, on `drafts` after these tokens, and
        on a chunk. Does not wait. Tokens of rows with drafts must have been read before."""
        found = Forward([], None, [], drafts=drafts)
        logits, hidden = list[mx.array](), list[mx.array]()
        widths = {row: 1 + len(own) for row, own in drafts.items()}
        for each in self.layout.passes(chunk, widths):
            out = attempt(partial(self._launch, each, drafts))
            if isinstance(out, Fault):
                found.failed.append(([*each.rows, *each.drafting], out))
                continue
            own = [*each.rows, *(row for row in each.drafting for _ in range(widths[row]))]
            found.rows.extend(own)
            logits.append(out.logits[: len(own)])
            if out.hidden is not None:
                hidden.append(out.hidden[: len(own)])
            if each.chunk is not None:
                found.took_chunk = True
                if each.chunk.ends_prompt:
                    found.chunk_logits = out.logits[-1]
                    found.chunk_hidden = None if out.hidden is None else out.hidden[-1:]
        found.logits = _join(logits) if logits else None
        found.hidden = _join(hidden) if hidden else None
        return found

    def _launch(self, one: Pass, drafts: Drafts) -> Output:
        pending = [self._pending[row] for row in one.rows]
        # the pending token is usually not committed yet: then its position is the row's length
        positions = [
            row.length - next_one.committed - next_one.to_replay + row.request.prompt.rope_delta
            for row, next_one in zip(one.rows, pending, strict=True)
        ]
        tokens = [_gather_tokens(pending)] if pending else []
        for row in one.drafting:
            first = row.length - 1 + row.request.prompt.rope_delta
            tokens += [mx.array(row.tokens[-1:], dtype=mx.int32), self._to_array(drafts[row])]
            positions += range(first, first + 1 + len(drafts[row]))
        out = run_pass(self.model, one, _join(tokens), positions, hidden_model=self._hidden_model)
        mx.async_eval(out.logits, offsets(one.cache))  # type: ignore[no-untyped-call]
        if any(row.retry_alone for row in one.rows[:1]):
            mx.eval(out.logits)  # a fault here belongs to this pass
        return out

    def _to_array(self, drafts: Sequence[int]) -> mx.array:
        if not isinstance(drafts, DeviceTokens):
            return mx.array([*drafts], dtype=mx.int32)
        return mx.clip(drafts.array.astype(mx.int32), 0, self.model.info.vocab_size - 1)

    def read(self) -> list[PassResult]:
        """Wait for the pending tokens, which are already in the last pass. Raises any error of the
        device, after which the tokens stay pending."""
        found = self.catch_up()
        left = [(row, own.to_replay - 1) for row, own in self._pending.items() if own.to_replay]
        self._pending = {row: Pending.of(row, to_replay) for row, to_replay in left}
        return found

    def catch_up(self) -> list[PassResult]:
        """Like `read`, but before `forward`, so the tokens stay pending."""
        due: dict[Drawn, dict[Row, Pending]] = {}
        for row, pending in self._pending.items():
            if not pending.committed:
                due.setdefault(pending.drawn, {})[row] = pending
        # an error of the device leaves all of them as they are
        found = [result for own in due.items() for result in read_drawn(*own)]
        for row, _, reads in found:
            drawn, at, *_ = self._pending[row]
            self._pending[row] = Pending(drawn, at + len(reads) - 1, committed=True)
        return found

    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, as of `Layout.extract`, without drafts that are not read."""
        pending = self._pending.get(row)
        if pending is not None and pending.drafts:
            self._pending[row] = pending._replace(drafts=())
            self.layout.keep_tokens(row, 1)
        return self.layout.extract(row)

    @property
    def drafted_rows(self) -> list[Row]:
        """Rows with drafts in a pass that is not read yet."""
        return [row for row, pending in self._pending.items() if pending.drafts]

    def set_drawn(self, rows: Sequence[Row], drawn: Drawn, drafts: Drafts = NO_DRAFTS) -> None:
        """Make each row's first drawn token pending. `rows`: the row of each, as in `Forward`."""
        for i, row in reversed(list(enumerate(rows))):
            self._pending[row] = Pending(drawn, i, False, drafts.get(row, ()))
        mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]

    def cached_reply_tokens(self, row: Row) -> int:
        """Committed reply tokens of the row that its cache has, or has after the launched pass."""
        pending = self._pending.get(row)
        if pending is None:
            return len(row.tokens)
        return len(row.tokens) - pending.committed - pending.to_replay


class Output(NamedTuple):
    logits: mx.array  # (n, vocab)
    hidden: mx.array | None = None  # (n, hidden), of the same tokens


def run_pass(
    model: LoadedModel,
    group: Pass,
    tokens: mx.array,
    positions: Iterable[int],
    *,
    hidden_model: HiddenStatesModel | None = None,
) -> Output:
    """Run the pass `group`. `tokens`, `positions`: of its rows and their drafts. Returns the output
    for each of them, then for the last token of a chunk that ends its prompt, not evaluated.
    `hidden_model`: the same model, if hidden states are wanted."""
    at, chunk, wanted = list(positions), group.chunk, tuple[mx.array, ...]()
    count, more = len(at), [0] * group.fillers
    at += more
    if chunk is not None:
        more = [*chunk.tokens]
        at += chunk.positions
        wanted = (mx.array([*range(count), *([len(at) - 1] if chunk.ends_prompt else [])]),)
    if more:
        tokens = mx.concatenate([tokens, mx.array(more, dtype=tokens.dtype)])
    places = mx.array(at, dtype=mx.int32)
    if hidden_model is not None:
        return Output(*hidden_model.decode_hidden(tokens, group.cache, places, *wanted))
    logits = model.decode(tokens, group.cache, places, *wanted)
    return Output(logits[:count] if group.fillers else logits)


def read_drawn(drawn: Drawn, rows: Mapping[Row, Pending]) -> list[PassResult]:
    """Wait for drawn tokens and judge the drafts by them. Raises any error of the device."""
    logprobs = read_logprobs(drawn)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    found = []
    for row, pending in rows.items():
        at = pending.at
        reads = [(row, tokens[at], logprobs.get(at))]
        for draft in pending.drafts:
            if draft != tokens[at]:
                break
            at += 1
            reads.append((row, tokens[at], logprobs.get(at)))
        found.append(PassResult(row, len(pending.drafts), reads))
    return found


def _gather_tokens(pending: Sequence[Pending]) -> mx.array:
    """The pending tokens, (rows,) int32, which are not read: they may be of several draws."""
    draws = list(dict.fromkeys(own.drawn for own in pending))
    first, indices = draws[0], [own.at for own in pending]
    if len(draws) == 1 and indices == list(range(first.tokens.size)):
        return first.tokens
    starts, size = {}, 0
    for draw in draws:
        starts[draw], size = size, size + draw.tokens.size
    at = [starts[own.drawn] + own.at for own in pending]
    return _join([draw.tokens for draw in draws])[mx.array(at)]


def _join(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def read_logprobs(drawn: Drawn) -> dict[int, Logprob]:
    """Log-probabilities by index among the drawn tokens. Waits for them."""
    asked = drawn.logprobs
    if asked is None:
        return {}
    found: Any = (array.tolist() for array in (asked.drawn, asked.top_ids, asked.top))
    return {
        at: Logprob(value, tuple(zip(ids, logprobs, strict=True))[:count])
        for at, count, value, ids, logprobs in zip(asked.indices, asked.counts, *found, strict=True)
    }
