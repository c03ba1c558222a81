"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ContextTooLong, MLXProviderError
from ..asked import Asked, Read
from ..openai.parameters import Parameters
from .compact import Compacted, kept, with_demand
from .reply import Stream, Whole, echo_of, failed_stream
from .request import question


def _respond(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    streamed = Parameters(body).flag("stream")
    asked, echo = question(body, sender), echo_of(body)
    request = asked.request
    reply = partial(Stream if streamed else Whole, tools=asked.tools, echo=echo)
    if not streamed:
        return Asked([request], reply, places=asked.places)

    def refusal(error: MLXProviderError) -> bytes:
        # Codex shortens a conversation only if a stream says that it is too long.
        if not isinstance(error, ContextTooLong):
            return b""
        return failed_stream(request.id, request.model, error, echo)

    return Asked([request], reply, refusal=refusal, places=asked.places)


def _compact(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    given = body.get("input")
    asked = question({**body, "input": with_demand(given)}, sender)
    reply = partial(Compacted, items=kept(given))
    return Asked([asked.request], reply, places=asked.places)


GENERATE: Mapping[str, Read] = {"/v1/responses": _respond, "/v1/responses/compact": _compact}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/responses/input_tokens": _respond}
