"""Commits what a pass gave: tokens become text, rows and requests end, computed KV is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...errors import MLXProviderError
from ...isolation import Fault, Isolation
from ...protocol.events import Event, Finish, FinishReason
from ..execution.decode_batch import Logprob, Read
from ..request import Phase, Request, Row
from .state import State

log = logging.getLogger(__name__)


class Commit:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State) -> None:
        self._state = state

    # -- requests

    def cancel(self, request: Request) -> None:
        """End a request wherever it is. What it held is free at once."""
        if self._abandon(request):
            self._state.output.ended(request, "cancelled")

    def fail(self, request: Request, error: MLXProviderError) -> None:
        """End a request with an error that its reader sees."""
        if self._abandon(request):
            self._state.output.failed(request, error)

    def isolated(self, request: Request, part: str) -> Isolation:
        """Around a request's own work: whatever that raises ends this request alone."""
        return Isolation(partial(self.failed_by, request, part))

    def failed_by(self, request: Request, part: str, fault: Fault) -> None:
        """A part of a request's work has failed."""
        if not fault.ours:
            log.error("request %s: %s failed\n%s", request.id, part, fault.trace)
        self.fail(request, fault.of_request(part))

    def _abandon(self, request: Request) -> bool:
        """Whether the request was still going on."""
        if request.phase is Phase.DONE:
            return False
        self._state.decisions.ended(request)
        for row in request.unfinished:
            row.finish = "cancelled"
        self.release(request, request.rows)
        return True

    # -- tokens

    def take(self, reads: Sequence[Read], now: float) -> None:
        """Take drawn tokens: post their text, and end the rows that are complete."""
        live = [read for read in reads if read[0].finish is None]
        for row, token, _ in live:
            self._state.output.token(row.request, now)
            row.tokens.append(token)
        reasons = self._state.decisions.reasons(partial(self._shown, live))
        for (row, _, _), reason in zip(live, reasons, strict=True):
            if reason is not None and row.finish is None:
                self.finish(row, reason)

    def _shown(self, reads: Sequence[Read]) -> list[FinishReason | None]:
        """Post what tokens add to the rows' texts; why each row ends with its token, or `None`."""
        reasons: list[FinishReason | None] = []
        for row, token, logprob in reads:
            reason = None
            if row.finish is None:  # another choice of its request may have failed
                with self.isolated(row.request, "its text"):
                    deltas, reason = self._text_of(row, token, logprob)
                    if deltas:
                        self._state.output.post(row.request, deltas)
            reasons.append(reason)
        return reasons

    def _text_of(
        self, row: Row, token: int, logprob: Logprob | None
    ) -> tuple[list[Any], FinishReason | None]:
        request = row.request
        if token in request.stop_tokens:
            return [], "stop"
        if row.constraint is not None:
            row.constraint.advance(token)
        described = None
        if logprob is not None:
            described = self._state.token_names.described(token, logprob)
        deltas = list(row.output.push(token, described))
        if row.output.stopped or (row.constraint is not None and row.constraint.finished):
            return deltas, "stop"
        return deltas, "length" if len(row.tokens) >= request.max_tokens else None

    # -- endings

    def finish(self, row: Row, reason: FinishReason) -> None:
        """End one choice. The request ends with its last one."""
        request = row.request
        found = self._state.decisions.last_reason(partial(self._last_text, row, reason))
        if found is None:
            return
        row.finish = found
        self.release(request, [row])
        if not request.unfinished:
            self._state.output.ended(request, found)

    def _last_text(self, row: Row, reason: FinishReason) -> FinishReason | None:
        """Post the last of a row's text; the true reason, `None`: its request has failed."""
        with self.isolated(row.request, "its text"):
            deltas, reason = row.output.finish(reason)
            events: list[Event] = [*deltas, Finish(index=row.index, reason=reason)]
            self._state.output.post(row.request, events)
            return reason
        return None

    def release(self, request: Request, rows: Sequence[Row]) -> None:
        """Free what rows hold: their place in the batch, or their prefill."""
        scheduler = self._state.scheduler
        running = [row for row in rows if row in scheduler.running]
        self.keep(request, running)
        self.drop(running)
        scheduler.leave(running)
        if not request.unfinished:
            self._state.ended.append(request)
            for job in scheduler.drop(request):
                job.restart()  # whoever remembers its last passes keeps no cache alive
            request.features = {}

    def drop(self, rows: Sequence[Row]) -> None:
        """Take rows out of the batch, for good or until they have started again."""
        self._state.batch.drop(rows)
        self._state.drafting.forget(rows)

    def keep(self, request: Request, running: Sequence[Row]) -> None:
        """Leave what rows and prefills of a request have computed to the prefix cache."""
        state = self._state
        if state.prefix_cache is None:
            return
        with Isolation(partial(not_kept, request)):
            for row in running:
                cached = state.batch.cached_tokens(row)
                if cached and row not in state.corrupted:
                    own = state.batch.extract(row)
                    state.prefix_cache.keep_row(row, row.tokens[:cached], own)
            for job in state.scheduler.waiting:
                if job.request is request and not request.unfinished:
                    state.prefix_cache.keep_prefill(job)


def not_kept(request: Request, fault: Fault) -> None:
    """The prefix cache has failed at what a request computed."""
    log.error("request %s could not be kept in the prefix cache\n%s", request.id, fault.trace)
