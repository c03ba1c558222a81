"""The rows that decode: their caches, and the tokens drawn for them but not read back yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...isolation import Fault, Isolation
from ...records import LoadedModel
from ..request import Row
from .batch_layout import Layout, Pass
from .piggyback import Rider
from .sampler import Drawn


@dataclass(frozen=True)
class Logprob:
    """Raw natural-log probability of a drawn token, and (id, logprob) of the best ones."""

    drawn: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Forward:
    """Logits after the pending tokens: (B, vocab) in the order of `rows`; and what failed."""

    rows: list[Row]
    logits: mx.array | None
    failed: list[tuple[list[Row], Fault]]
    """Rows whose pass failed, with what it raised; their caches are spoilt."""
    rider_logits: mx.array | None = None
    """(vocab,) after the rider's last token; `None`: it did not come along, or failed."""


class DecodeBatch:
    """Device work of decoding: one forward pass per step, tokens read a step later."""

    def __init__(self, model: LoadedModel, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self._pending: list[tuple[list[Row], Drawn]] = []
        self._rows: set[int] = set()
        self._taken: set[int] = set()
        """Rows whose pending token is committed already."""

    def join(
        self, rows: list[Row], caches: Sequence[list[Any]], drawn: Drawn, *, taken: bool = False
    ) -> None:
        """Let rows in with their own caches and first drawn tokens.

        `taken`: those tokens were read and committed; they wait only to be fed to the model.
        """
        for row, cache in zip(rows, caches, strict=True):
            self.layout.add(row, cache)
            self._rows.add(id(row))
        self._pending.append((rows, drawn))
        if taken:
            self._taken.update(map(id, rows))

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows out; whatever is pending for them is forgotten."""
        gone = set(map(id, rows))
        self._rows -= gone
        self._taken -= gone
        if rows:
            self.layout.drop(rows)
        kept = []
        for owners, drawn in self._pending:
            stay = [i for i, row in enumerate(owners) if id(row) not in gone]
            if len(stay) == len(owners):
                kept.append((owners, drawn))
            elif stay:
                part = Drawn(drawn.tokens[mx.array(stay)], drawn.logprobs)
                kept.append(([owners[i] for i in stay], part))
        self._pending = kept

    def forward(self, rider: Rider | None = None) -> Forward:
        """Launch the model on the pending token of every row, and on a rider; does not wait."""
        owners = [row for rows, _ in self._pending for row in rows]
        if not owners:
            return Forward([], None, [])
        tokens = _joined([drawn.tokens for _, drawn in self._pending])
        rows: list[Row] = []
        logits, failed, after_rider = [], [], None
        for each in self.layout.passes(rider):
            with Isolation() as tried:
                out = self._decode(each, _of(each.rows, owners, tokens))
                mx.async_eval(out)  # type: ignore[no-untyped-call]
            if tried.fault is not None:
                failed.append((list(each.rows), tried.fault))
                continue
            rows.extend(each.rows)
            if each.rider is not None:
                out, after_rider = out[: len(each.rows)], out[-1]
            logits.append(out)
        return Forward(rows, _joined(logits) if logits else None, failed, after_rider)

    def _decode(self, each: Pass, tokens: mx.array) -> mx.array:
        # the token about to be fed is mostly not committed yet: its position is the row's length
        at = [row.length + row.request.prompt.rope_delta for row in each.rows]
        if self._taken:
            at = [n - (id(row) in self._taken) for n, row in zip(at, each.rows, strict=True)]
        return run_pass(self.model, each, tokens, at)

    def read(self) -> list[tuple[Row, int, Logprob | None]]:
        """Wait for the pending tokens and take them, one per row.

        Raises whatever the device raises; the tokens then stay pending.
        """
        out: list[tuple[Row, int, Logprob | None]] = []
        for rows, drawn in self._pending:
            if not self._taken.issuperset(map(id, rows)):
                out += read_drawn(rows, drawn)
        self._pending = []
        self._taken = set()
        return out

    def drawn(self, rows: list[Row], drawn: Drawn) -> None:
        """Take the next tokens of rows that are already in; launch their computation."""
        self._pending.append((rows, drawn))
        mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]

    def held(self, rows: Sequence[Row]) -> list[int]:
        """Indices of the rows that are in."""
        return [i for i, row in enumerate(rows) if id(row) in self._rows]

    def holds(self, row: Row) -> bool:
        """Whether the row has joined."""
        return id(row) in self._rows

    def fed(self, row: Row) -> int:
        """Committed tokens of a row that its cache holds."""
        return len(row.tokens) - (id(row) in self._taken)


def run_pass(
    model: LoadedModel, each: Pass, tokens: mx.array, positions: Sequence[int]
) -> mx.array:
    """Logits after the rows' tokens, then after each of the rider's: (B, vocab)."""
    at = list(positions)
    if each.rider is not None:
        tokens = mx.concatenate([tokens, mx.array(list(each.rider.tokens), dtype=tokens.dtype)])
        at += each.rider.positions
    return model.decode(tokens, each.cache, mx.array(at, dtype=mx.int32))


def read_drawn(rows: Sequence[Row], drawn: Drawn) -> list[tuple[Row, int, Logprob | None]]:
    """Wait for drawn tokens and take them, one per row. Raises whatever the device raises."""
    logprobs = _read_logprobs(drawn)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    return [(row, t, logprobs.get(id(row))) for row, t in zip(rows, tokens, strict=True)]


def _of(rows: Sequence[Row], owners: Sequence[Row], tokens: mx.array) -> mx.array:
    """The tokens of `rows`, which lie in the order of `owners`."""
    if rows == owners:
        return tokens
    at = {id(row): i for i, row in enumerate(owners)}
    return tokens[mx.array([at[id(row)] for row in rows])]


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _read_logprobs(drawn: Drawn) -> dict[int, Logprob]:
    asked = drawn.logprobs
    if asked is None:
        return {}
    values: list[float] = asked.drawn.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = asked.top_ids.tolist()  # type: ignore[assignment]
    tops: list[list[float]] = asked.top.tolist()  # type: ignore[assignment]
    return {
        id(row): Logprob(value, tuple(zip(i, t, strict=True))[: row.request.logprobs])
        for row, value, i, t in zip(asked.rows, values, ids, tops, strict=True)
    }
