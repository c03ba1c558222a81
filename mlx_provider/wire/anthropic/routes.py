"""The routes of Anthropic's API: from a body to a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..asked import Asked, Read
from ..objects import check_known
from ..openai.parameters import Parameters
from .reply import Shown, Stream, Whole
from .request import cache_marks, message_request

DISPLAYS = ("summarized", "omitted")
"""Of thoughts: a local model's are sent whole in place of a summary."""


def _messages(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    params = Parameters(body)
    reply, thinking = Stream if params.flag("stream") else Whole, params.mapping("thinking")
    if thinking.get("display") is not None:
        check_known(thinking["display"], DISPLAYS, "thinking.display")
    request, places = message_request(body, sender)
    shown = Shown(thoughts=thinking.get("display") != "omitted", stored=bool(cache_marks(body)))
    return Asked([request], partial(reply, wanted=body["max_tokens"], shown=shown), places=places)


def _count(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    request, places = message_request(body, sender, counted=True)
    return Asked([request], partial(Whole, wanted=None), places=places)


GENERATE: Mapping[str, Read] = {"/v1/messages": _messages}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/messages/count_tokens": _count}
