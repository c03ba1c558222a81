"""`/v1/responses/compact`: a conversation as its user messages and a summary by the model.

The routes of the Responses API.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ContextTooLong, MLXProviderError
from ...protocol.events import Accepted, Done, Event
from ..body import Asked, Read, objects
from ..openai.parameters import Parameters
from ..openai.prompts import AnswerForm
from ..openai.stream import Collected
from ..replies import Whole
from .conversation import sealed
from .reply import Stream, echo_of, failed_stream, response_usage
from .reply import Whole as ReplyWhole
from .request import question

DEMAND = (
    "Summarise this conversation for an assistant that continues it without having seen it: the "
    "goal, what was done and found, decisions and constraints of the user, names of files and "
    "values that are still needed, and the next steps. Write the summary alone."
)


def with_demand(given: Any) -> Any:
    turn = {"role": "user", "content": DEMAND}
    if isinstance(given, str):
        return [{"role": "user", "content": given}, turn]
    return [*given, turn] if isinstance(given, list) else given


def kept(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = [item for _, item in objects(given, "input") if _is_users(item)]
    return [_as_output(item, index) for index, item in enumerate(messages)]


def _is_users(item: Any) -> bool:
    return (item.get("type") or "message") == "message" and (item.get("role") or "user") == "user"


def _as_output(item: Any, index: int) -> dict[str, Any]:
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    head = {"id": item.get("id") or f"msg_{index}", "type": "message", "role": "user"}
    return {**head, "status": "completed", "content": parts or []}


class Compacted(Whole):
    def __init__(self, accepted: Accepted, items: list[dict[str, Any]]) -> None:
        self._id = accepted.id
        self._items = items
        self._collected = Collected(AnswerForm())

    def _take(self, event: Event) -> None:
        self._collected.take(event)

    def _body(self, done: Done) -> dict[str, Any]:
        texts = [text for answer in self._collected.answers() for text in answer.content]
        item = {
            "id": f"cmp_{self._id}",
            "type": "compaction",
            "encrypted_content": sealed("".join(texts)),
        }
        return {
            "id": f"resp_{self._id}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._items, item],
            "usage": response_usage(done),
        }


def _respond(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    streamed = Parameters(body).flag("stream")
    asked, echo = question(body, sender), echo_of(body)
    request = asked.request
    reply = partial(Stream if streamed else ReplyWhole, tools=asked.tools, echo=echo)
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
