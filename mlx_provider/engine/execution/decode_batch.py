"""The rows that decode: their caches, and the tokens drawn for them but not read back yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...isolation import Fault, Isolation
from ...records import LoadedModel
from ..request import Row
from .batch_layout import Layout, Pass
from .grouped_kv import offsets
from .piggyback import PiggybackedChunk
from .sampler import Drawn


@dataclass(frozen=True)
class Logprob:
    """Raw natural-log probability of a drawn token, and (id, logprob) of the best ones."""

    drawn: float
    top: tuple[tuple[int, float], ...]


Read = tuple[Row, int, Logprob | None]
"""A token that was drawn for a row."""


@dataclass(frozen=True)
class Forward:
    """Logits after the pending tokens: (B, vocab) in the order of `rows`; and what failed."""

    rows: list[Row]
    logits: mx.array | None
    failed: list[tuple[list[Row], Fault]]
    """Rows whose pass failed, with what it raised; their caches are corrupted."""
    took_chunk: bool = False
    """Whether the piggybacked chunk is on its way, too."""
    chunk_logits: mx.array | None = None
    """(vocab,) after the chunk, where it ends its prompt."""


@dataclass(frozen=True)
class Pending:
    """The next token of a row, on its way to the model."""

    drawn: Drawn
    index: int
    """Among the drawn ones."""
    committed: bool
    """It was read already."""


class DecodeBatch:
    """Device work of decoding: one forward pass per step, tokens read a step later."""

    def __init__(self, model: LoadedModel, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self._pending: dict[Row, Pending] = {}

    @property
    def passes(self) -> int:
        """Forward passes that one token of every row takes."""
        return 1 if self.layout.name == "grouped" else max(1, len(self.layout.passes()))

    def join(self, row: Row, cache: list[Any], drawn: Drawn, *, committed: bool = False) -> None:
        """Let a row in with its own cache and first drawn token."""
        self.layout.add(row, cache)
        self._pending[row] = Pending(drawn, 0, committed)

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows out; what is pending for them is forgotten."""
        if rows:
            self.layout.drop(rows)
        for row in rows:
            self._pending.pop(row, None)

    def forward(self, chunk: PiggybackedChunk | None = None) -> Forward:
        """Launch the model on the pending token of every row, and on a chunk; does not wait."""
        rows: list[Row] = []
        logits, failed, took_chunk, after_chunk = [], [], False, None
        for each in self.layout.passes(chunk):
            with Isolation() as tried:
                out = self._run(each)
                mx.async_eval(out, offsets(each.cache))  # type: ignore[no-untyped-call]
            if tried.fault is not None:
                failed.append((list(each.rows), tried.fault))
                continue
            rows.extend(each.rows)
            if each.chunk is not None:
                took_chunk = True
                after_chunk = out[-1] if each.chunk.ends_prompt else None
                out = out[: len(each.rows)]
            logits.append(out)
        joined = _joined(logits) if logits else None
        return Forward(rows, joined, failed, took_chunk, after_chunk)

    def _run(self, each: Pass) -> mx.array:
        pending = [self._pending[row] for row in each.rows]
        # the token about to be cached is mostly not committed yet: its position is the row's length
        at = [
            row.length - next_one.committed + row.request.prompt.rope_delta
            for row, next_one in zip(each.rows, pending, strict=True)
        ]
        return run_pass(self.model, each, _tokens(pending), at)

    def read(self) -> list[Read]:
        """Wait for the pending tokens and take them, one per row.

        Raises whatever the device raises; the tokens then stay pending.
        """
        due: dict[Drawn, dict[Row, int]] = {}
        for row, pending in self._pending.items():
            if not pending.committed:
                due.setdefault(pending.drawn, {})[row] = pending.index
        found = [read for drawn, rows in due.items() for read in read_drawn(drawn, rows)]
        self._pending = {}
        return found

    def drawn(self, rows: Sequence[Row], drawn: Drawn) -> None:
        """Take the next tokens of rows that are in; launch their computation."""
        self._pending |= {row: Pending(drawn, i, False) for i, row in enumerate(rows)}
        mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]

    def cached_tokens(self, row: Row) -> int:
        """Committed tokens of a row that its cache holds."""
        pending = self._pending.get(row)
        return len(row.tokens) - (pending is not None and pending.committed)


def run_pass(
    model: LoadedModel, each: Pass, tokens: mx.array, positions: Iterable[int]
) -> mx.array:
    """Logits after the rows' tokens, then after the chunk if that ends its prompt: (B, vocab)."""
    at, chunk = list(positions), each.chunk
    if chunk is None:
        return model.decode(tokens, each.cache, mx.array(at, dtype=mx.int32))
    tokens = mx.concatenate([tokens, mx.array(list(chunk.tokens), dtype=tokens.dtype)])
    at += chunk.positions
    wanted = [*range(len(each.rows)), *([len(at) - 1] if chunk.ends_prompt else [])]
    return model.decode(tokens, each.cache, mx.array(at, dtype=mx.int32), mx.array(wanted))


def read_drawn(drawn: Drawn, rows: dict[Row, int]) -> list[Read]:
    """Wait for drawn tokens and take those of `rows`, by their index.

    Raises whatever the device raises.
    """
    logprobs = _read_logprobs(drawn)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    return [(row, tokens[i], logprobs.get(row)) for row, i in rows.items()]


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


def _read_logprobs(drawn: Drawn) -> dict[Row, Logprob]:
    asked = drawn.logprobs
    if asked is None:
        return {}
    values: list[float] = asked.drawn.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = asked.top_ids.tolist()  # type: ignore[assignment]
    tops: list[list[float]] = asked.top.tolist()  # type: ignore[assignment]
    return {
        row: Logprob(value, tuple(zip(i, t, strict=True))[: row.request.logprobs])
        for row, value, i, t in zip(asked.rows, values, ids, tops, strict=True)
    }
