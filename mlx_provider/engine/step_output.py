"""Output of a step for readers and for the operator: events, counts, one log line per request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import MLXProviderError
from ..protocol.events import Done, Event, Failed, Usage
from .request import Request
from .request_log import Recorder, log_line, timings_of

log = logging.getLogger(__name__)

Post = tuple[Request, list[Event]]
"""Events of one step for one request. Its reader waits at `Request.events`."""


class StepOutput:
    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self.recorder = recorder
        self.clock = clock
        self._events: dict[Request, list[Event]] = {}
        self._decoded = 0

    def post(self, request: Request, events: Sequence[Event]) -> None:
        """Events are delivered after the step."""
        self._events.setdefault(request, []).extend(events)

    @property
    def empty(self) -> bool:
        return not self._events

    @property
    def decoded(self) -> int:
        """Tokens committed since the last `take`."""
        return self._decoded

    def take(self) -> list[Post]:
        if self._decoded:
            self.recorder.tokens(prefilled=0, cached=0, decoded=self._decoded)
            self._decoded = 0
        events, self._events = self._events, {}
        return list(events.items())

    def started(self, request: Request) -> None:
        """Its first chunk is about to run."""
        if request.started is None and not request.ahead:
            request.started = self.clock()
            self.recorder.request_started()

    def token(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.recorder.first_token(now - request.arrived)
        elif request.last_token is not None:
            self.recorder.inter_token(now - request.last_token)
        request.last_token = now
        self._decoded += 1

    def ended(self, request: Request, reason: str) -> None:
        """Its last row has ended."""
        now = self.clock()
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached,
            stored_tokens=request.stored,
            completion_tokens=request.completion_tokens,
            reasoning_tokens=request.reasoning_tokens,
            skipped_tokens=request.skipped,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
        )
        self.post(request, [Done(usage=usage, timings=timings_of(request, now))])
        self.recorder.request_finished(reason)
        log.info(log_line(request, reason, now))

    def failed(self, request: Request, error: MLXProviderError) -> None:
        self.post(request, [Failed.of(error)])
        self.recorder.request_failed(error.code)
        log.warning("request %s failed: %s", request.id, error.message)
