"""The rows that decode: their caches, and the tokens drawn for them but not read back yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ...isolation import Fault, Isolation
from ...records import LoadedModel, ShowsHidden
from ...upstream.batch_caches import RowCache
from ..request import Row
from .batch_layout import Layout, Pass
from .grouped_kv import offsets
from .mixed_chunk import MixedChunk
from .sampler import Drawn


@dataclass(frozen=True)
class Logprob:
    """Raw natural-log probability of a drawn token, and (id, logprob) of the best ones."""

    drawn: float
    top: tuple[tuple[int, float], ...]


Read = tuple[Row, int, Logprob | None]
"""A token that was drawn for a row."""


Drafts = Mapping[Row, Sequence[int]]
"""Tokens that may follow a row's next one."""
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(frozen=True)
class Forward:
    """Logits after the pending tokens: (B, vocab) in the order of `rows`; and what failed."""

    rows: list[Row]
    """A row with drafts stands here once for each of its positions."""
    logits: mx.array | None
    failed: list[tuple[list[Row], Fault]]
    """Rows whose pass failed, with what it raised; their caches are corrupted."""
    took_chunk: bool = False
    """Whether the mixed chunk is on its way, too."""
    chunk_logits: mx.array | None = None
    """(vocab,) after the chunk, where it ends its prompt."""
    drafts: Drafts = field(default_factory=dict)
    """Those that the pass took along."""
    hidden: mx.array | None = None
    """States from which the logits were made, (B, hidden), where a drafter is shown them."""
    chunk_hidden: mx.array | None = None
    """That after the chunk, (1, hidden), where it ends its prompt."""


@dataclass(frozen=True)
class Pending:
    """The next token of a row, on its way to the model."""

    drawn: Drawn
    index: int
    """Among the drawn ones."""
    committed: bool
    """It was read already."""
    drafts: Sequence[int] = ()
    """Drafts that its pass took along: the next token, then one for each of them that holds."""
    behind: int = 0
    """Committed tokens of the row after it, which are run again one by one."""

    @classmethod
    def again(cls, row: Row, behind: int) -> Pending:
        """The committed token after which so many others stand."""
        token = row.tokens[-1 - behind]
        return cls(Drawn(mx.array([token], dtype=mx.int32), None), 0, True, behind=behind)


class DecodeBatch:
    """Device work of decoding: one forward pass per step, tokens read a step later."""

    def __init__(self, model: LoadedModel, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self.shows_hidden = False
        """Whether passes hand out the hidden states behind their logits."""
        self._pending: dict[Row, Pending] = {}

    @property
    def passes(self) -> int:
        """Forward passes that one token of every row takes."""
        return 1 if self.layout.name == "grouped" else max(1, len(self.layout.passes()))

    def join(self, row: Row, cache: list[Any], drawn: Drawn, *, committed: bool = False) -> None:
        """Let a row in with its own cache and first drawn token."""
        self.layout.add(row, cache)
        self._pending[row] = Pending(drawn, 0, committed)

    def join_again(self, row: Row, cache: list[Any]) -> None:
        """Let a row in whose cache holds its prompt alone; its committed tokens are run again."""
        self.layout.add(row, cache)
        self._pending[row] = Pending.again(row, len(row.tokens) - 1)

    def replays(self, row: Row) -> bool:
        """Whether the next token of a row is a committed one; asked after `read`."""
        return row in self._pending

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows out; what is pending for them is forgotten."""
        if rows:
            self.layout.drop(rows)
        for row in rows:
            self._pending.pop(row, None)

    def forward(self, chunk: MixedChunk | None = None, drafts: Drafts = NO_DRAFTS) -> Forward:
        """Launch the model on the pending token of every row, and on a chunk; does not wait.

        drafts: behind the pending tokens of rows whose tokens were all read.
        """
        rows: list[Row] = []
        logits, hidden, failed, took_chunk, after_chunk = [], [], [], False, None
        chunk_hidden = None
        widths = {row: 1 + len(own) for row, own in drafts.items()}
        for each in self.layout.passes(chunk, widths):
            with Isolation() as tried:
                out = self._run(each, drafts)
                mx.async_eval(out.logits, offsets(each.cache))  # type: ignore[no-untyped-call]
                if any(row.retry_alone for row in each.rows[:1]):
                    mx.eval(out.logits)  # what fails here is its own
            if tried.fault is not None:
                failed.append(([*each.rows, *each.drafting], tried.fault))
                continue
            took = positions(each, widths)
            rows.extend(took)
            if each.chunk is not None:
                took_chunk = True
                after_chunk = out.logits[-1] if each.chunk.ends_prompt else None
            logits.append(out.logits[: len(took)])
            if out.hidden is not None:
                hidden.append(out.hidden[: len(took)])
                chunk_hidden = out.hidden[len(took) :] if after_chunk is not None else None
        return Forward(
            rows,
            _joined(logits) if logits else None,
            failed,
            took_chunk,
            after_chunk,
            drafts,
            _joined(hidden) if hidden else None,
            chunk_hidden,
        )

    def _run(self, each: Pass, drafts: Drafts) -> Output:
        pending = [self._pending[row] for row in each.rows]
        # the token about to be cached is mostly not committed yet: its position is the row's length
        at = [
            row.length - next_one.committed - next_one.behind + row.request.prompt.rope_delta
            for row, next_one in zip(each.rows, pending, strict=True)
        ]
        tokens = [_tokens(pending)] if pending else []
        for row in each.drafting:
            own = [row.tokens[-1], *drafts[row]]
            tokens.append(mx.array(own, dtype=mx.int32))
            first = row.length - 1 + row.request.prompt.rope_delta
            at += range(first, first + len(own))
        return run_pass(self.model, each, _joined(tokens), at, hidden=self.shows_hidden)

    def read(self) -> list[Read]:
        """Wait for the pending tokens and take them, one per row.

        Raises whatever the device raises; the tokens then stay pending.
        """
        found = [read for _, reads in self._read() for read in reads]
        again = {row: pending.behind for row, pending in self._pending.items() if pending.behind}
        self._pending = {row: Pending.again(row, behind - 1) for row, behind in again.items()}
        return found

    def catch_up(self) -> list[tuple[Row, int, list[Read]]]:
        """As `read`, before the tokens were handed to the model: each row's draws that hold, and
        how many drafts it had.

        Whoever commits them says of each what stays of its pass, by `keep`.
        """
        found = []
        for row, reads in self._read():
            before = self._pending[row]
            at = before.index + len(reads) - 1
            self._pending[row] = replace(before, index=at, committed=True, drafts=())
            found.append((row, len(before.drafts), reads))
        return found

    def keep(self, row: Row, tokens: int) -> None:
        """Of the tokens of the last pass, the first ones are the row's."""
        self.layout.keep(row, tokens)

    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, see `Layout`; what it guessed and nobody has read is gone."""
        pending = self._pending.get(row)
        if pending is not None and pending.drafts:
            self._pending[row] = replace(pending, drafts=())
            self.layout.keep(row, 1)
        return self.layout.extract(row)

    @property
    def drafted(self) -> bool:
        """Whether a pass with drafts was not read yet: `catch_up` must come first."""
        return any(pending.drafts for pending in self._pending.values())

    def _read(self) -> list[tuple[Row, list[Read]]]:
        due: dict[Drawn, dict[Row, Pending]] = {}
        for row, pending in self._pending.items():
            if not pending.committed:
                due.setdefault(pending.drawn, {})[row] = pending
        return [each for drawn, rows in due.items() for each in _that_hold(drawn, rows)]

    def drawn(self, rows: Sequence[Row], drawn: Drawn, drafts: Drafts = NO_DRAFTS) -> None:
        """Take the next tokens of rows that are in; launch their computation."""
        for i, row in reversed(list(enumerate(rows))):
            self._pending[row] = Pending(drawn, i, False, drafts.get(row, ()))
        mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]

    def cached_tokens(self, row: Row) -> int:
        """Committed tokens of a row that its cache holds."""
        pending = self._pending.get(row)
        if pending is None:
            return len(row.tokens)
        return len(row.tokens) - pending.committed - pending.behind


@dataclass(frozen=True)
class Output:
    """What a pass gives after the tokens whose logits are wanted."""

    logits: mx.array
    """(B, vocab)"""
    hidden: mx.array | None = None
    """(B, hidden)"""


def run_pass(
    model: LoadedModel,
    each: Pass,
    tokens: mx.array,
    positions: Iterable[int],
    *,
    hidden: bool = False,
) -> Output:
    """What follows the rows' tokens and drafts, then the chunk if that ends its prompt."""
    at, chunk, wanted = list(positions), each.chunk, None
    if each.fillers:
        first = [0] * each.fillers
        tokens = mx.concatenate([tokens, mx.array(first, dtype=tokens.dtype)])
        places = mx.array(at + first, dtype=mx.int32)
        return Output(model.decode(tokens, each.cache, places)[: len(at)])
    if chunk is not None:
        rows = len(at)
        tokens = mx.concatenate([tokens, mx.array(list(chunk.tokens), dtype=tokens.dtype)])
        at += chunk.positions
        wanted = mx.array([*range(rows), *([len(at) - 1] if chunk.ends_prompt else [])])
    places = mx.array(at, dtype=mx.int32)
    if hidden and isinstance(model, ShowsHidden):
        return Output(*model.decode_hidden(tokens, each.cache, places, wanted))
    if wanted is None:
        return Output(model.decode(tokens, each.cache, places))
    return Output(model.decode(tokens, each.cache, places, wanted))


def positions(each: Pass, widths: Mapping[Row, int]) -> list[Row]:
    """Whose the logits of a pass are, those of its chunk apart."""
    return [*each.rows, *(row for row in each.drafting for _ in range(widths[row]))]


def read_drawn(drawn: Drawn, rows: dict[Row, int]) -> list[Read]:
    """Wait for drawn tokens and take those of `rows`, by their index.

    Raises whatever the device raises.
    """
    logprobs = read_logprobs(drawn)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    return [(row, tokens[i], logprobs.get(i)) for row, i in rows.items()]


def _that_hold(drawn: Drawn, rows: dict[Row, Pending]) -> list[tuple[Row, list[Read]]]:
    """Of each row the next token, and those after drafts that were drawn just so."""
    logprobs = read_logprobs(drawn)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    found = []
    for row, pending in rows.items():
        at = pending.index
        reads = [(row, tokens[at], logprobs.get(at))]
        for draft in pending.drafts:
            if draft != tokens[at]:
                break
            at += 1
            reads.append((row, tokens[at], logprobs.get(at)))
        found.append((row, reads))
    return found


def _tokens(pending: Sequence[Pending]) -> mx.array:
    """Pending tokens in their order: those of one draw mostly lie so already."""
    draws = list(dict.fromkeys(each.drawn for each in pending))
    first, indices = draws[0], [each.index for each in pending]
    if len(draws) == 1 and indices == list(range(first.tokens.size)):
        return first.tokens
    starts, size = {}, 0
    for draw in draws:
        starts[draw], size = size, size + draw.tokens.size
    at = [starts[each.drawn] + each.index for each in pending]
    return _joined([draw.tokens for draw in draws])[mx.array(at)]


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def read_logprobs(drawn: Drawn) -> dict[int, Logprob]:
    """Those that were asked for, by the index among the drawn tokens."""
    asked = drawn.logprobs
    if asked is None:
        return {}
    values: list[float] = asked.drawn.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = asked.top_ids.tolist()  # type: ignore[assignment]
    tops: list[list[float]] = asked.top.tolist()  # type: ignore[assignment]
    return {
        at: Logprob(value, tuple(zip(i, t, strict=True))[:count])
        for at, count, value, i, t in zip(
            asked.indices, asked.counts, values, ids, tops, strict=True
        )
    }
