"""The routes of Anthropic's API: from a body to what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..asked import Asked, Read
from ..openai.parameters import Parameters
from .reply import Stream, Whole
from .request import message_request


def _messages(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    reply = Stream if Parameters(body).flag("stream") else Whole
    request = message_request(body, sender)
    wanted = body["max_tokens"]
    return Asked([request], partial(reply, wanted=wanted))


def _count(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    request = message_request(body, sender, counted=True)
    return Asked([request], partial(Whole, wanted=None))


GENERATE: Mapping[str, Read] = {"/v1/messages": _messages}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/messages/count_tokens": _count}
