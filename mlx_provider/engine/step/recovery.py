"""Recovers from a device failure: rows start again, each alone until it has decoded once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Fault
from ..execution.decode_batch import DecodeBatch
from ..execution.sampler import Drawn
from ..request import Row
from .commit import Commit
from .draw import Draws
from .start import Start
from .state import State

log = logging.getLogger(__name__)


class Recovery:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State, commit: Commit, start: Start, draws: Draws) -> None:
        self._state = state
        self._commit = commit
        self._start = start
        self._draws = draws

    def pass_failed(self, left: list[Row], fault: Fault, *, alone: bool, mixed: bool) -> None:
        """`left`: rows of the pass that have not ended since. `alone`: it had only one row."""
        if mixed or (left and not alone):
            self.retry(left, fault)
        elif left:
            self._commit.failed_by(left[0].request, "its decode step", fault)

    def unreadable(self, fault: Fault) -> None:
        """The tokens of the last pass cannot be read, so the caches of all rows are corrupted."""
        running = list(self._state.scheduler.running)
        self._state.corrupted = set(running)
        self.retry(running, fault)

    def retry(self, rows: Sequence[Row], fault: Fault) -> None:
        """Restart rows with corrupted caches from their committed tokens, each alone."""
        state = self._state
        log.warning(
            "a decode step of %d rows failed (%s); they are run again", len(rows), fault.summary
        )
        state.timer.forget()
        self._commit.drop(rows)
        for job in state.scheduler.retry(rows):
            self._start.look_up(job)
        state.batching.failed()

    def prove(self, row: Row, cache: list[Any], drawn: Drawn) -> Drawn | None:
        """Decode a row of a failed step alone once. If that also fails, the row causes the
        failure."""
        state = self._state
        alone = DecodeBatch(state.model, state.batching.layout("solo"))
        alone.join(row, cache, drawn)
        with self._commit.isolated(row.request, "its decode step") as work:
            forward = alone.forward()
            if forward.logits is None:
                raise forward.failed[0][1].error
            mx.eval(forward.logits)
            read = [read for each in alone.read() for read in each.reads]
            alone.drop([row])  # its recurrent state is back in `cache`
        if work.fault is not None or forward.logits is None:
            return None
        row.retry_alone = False
        self._commit.take(read, state.clock())
        return None if row.finish is not None else self._draws.one(row, forward.logits[0])
