"""OpenTelemetry spans for the engine's work on a request, in LiteLLM's trace.

LiteLLM's callback `otel` has a parent span for the request, which it makes from the client's
`traceparent` if there is one, and passes on as `litellm_parent_otel_span` (1.106.2,
`proxy/litellm_pre_call_utils.py`); for a script, the parent is the current span. The engine reports
the duration of each part with its last event, so the process that exports LiteLLM's spans makes
these, too. Engine and protocol do not contain traces.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RequestFailed
from ..isolation import Fault, Isolation
from ..protocol.events import Accepted, Done, Event, Failed, Timings

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)

SLOTS = ("metadata", "litellm_metadata")
PARENT = "litellm_parent_otel_span"
NANO = 1_000_000_000


class EngineSpans:
    """The spans of one request, from its submission. Errors of an exporter do not affect the
    reply."""

    def __init__(self, parent: Context, model: str) -> None:
        self._parent = parent
        self._model = model
        self._began = time.time_ns()
        self._ended = False

    @classmethod
    def of(cls, litellm_params: Mapping[str, Any], model: str) -> EngineSpans | None:
        """`None`: this process does not use OpenTelemetry."""
        if "opentelemetry.trace" not in sys.modules:
            return None
        from opentelemetry import context, trace

        slots = (litellm_params.get(name) for name in SLOTS)
        found = (slot.get(PARENT) for slot in slots if isinstance(slot, Mapping))
        span = next((span for span in found if isinstance(span, trace.Span)), None)
        if span is None:
            return cls(context.get_current(), model)
        return cls(trace.set_span_in_context(span), model)

    def watch(self, accepted: Accepted, events: Iterable[Event]) -> None:
        """Make the spans if the request has ended."""
        for event in events:
            if isinstance(event, Done | Failed):
                self._end(accepted, event)

    def left(self, accepted: Accepted) -> None:
        """The client has left."""
        self._end(accepted, Failed.of(RequestFailed.cancelled()))

    def _end(self, accepted: Accepted, end: Done | Failed) -> None:
        if self._ended:
            return
        self._ended = True
        with Isolation(_untold):
            self._make(accepted, end)

    def _make(self, accepted: Accepted, end: Done | Failed) -> None:
        from opentelemetry import trace

        tracer = trace.get_tracer("mlx_provider")
        whole = tracer.start_span(
            "mlx_provider request",
            self._parent,
            start_time=self._began,
            attributes=_attributes(self._model, accepted, end),
        )
        if isinstance(end, Failed):
            whole.set_status(trace.StatusCode.ERROR, end.error.code)
            whole.end()
            return
        inside = trace.set_span_in_context(whole, self._parent)
        for name, start, stop in _parts(end.timings):
            part = tracer.start_span(name, inside, start_time=self._at(start))
            part.end(self._at(stop))
        whole.end(self._at(end.timings.total))

    def _at(self, seconds: float) -> int:
        return self._began + int(seconds * NANO)


def _parts(times: Timings) -> Iterable[tuple[str, float, float]]:
    """Name, start and end of each part, in seconds from the start."""
    yield "mlx_provider queue", 0.0, times.queued
    yield "mlx_provider prefill", times.queued, times.first_token
    if times.total > times.first_token:
        yield "mlx_provider decode", times.first_token, times.total


def _attributes(model: str, accepted: Accepted, end: Done | Failed) -> dict[str, Any]:
    """Attributes, named by OpenTelemetry's conventions for generative AI where these exist."""
    told: dict[str, Any] = {
        "gen_ai.system": "mlx_provider",
        "gen_ai.request.model": model,
        "gen_ai.response.id": accepted.id,
        "gen_ai.usage.input_tokens": accepted.prompt_tokens,
    }
    if isinstance(end, Failed):
        return {**told, "error.type": end.error.code}
    usage = end.usage
    return {
        **told,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "mlx_provider.cached_tokens": usage.cached_tokens,
        "mlx_provider.drafted_tokens": usage.drafted_tokens,
        "mlx_provider.accepted_tokens": usage.accepted_tokens,
        "mlx_provider.tokens_per_second": end.timings.tokens_per_second,
    }


def _untold(fault: Fault) -> None:
    log.warning("a request's spans are lost: %s", fault.summary)
