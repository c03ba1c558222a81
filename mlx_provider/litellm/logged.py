"""Passes what a bridge would lose of a reply: its warnings, and how a message ended. LiteLLM reads
headers only from complete chat responses (`_hidden_params`, 1.106.2), and its bridge of the
Messages API knows no stop sequence (`_translate_openai_finish_reason_to_anthropic`). Handler and
hooks share the logging object of a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.events import Finish
from ..wire import sse
from ..wire.anthropic.reply import ending
from ..wire.warnings import HEADER, header_text

WARNINGS = "mlx_warnings"
ENDING = "mlx_ending"
LAST_EVENT = b"event: message_delta\n"


def keep_warnings(logging: Any, warnings: Sequence[str]) -> None:
    if warnings:
        details = _details(logging)
        details[WARNINGS] = list(dict.fromkeys([*details.get(WARNINGS, ()), *warnings]))


def warning_headers(logging: Any) -> dict[str, str] | None:
    """The proxy adds the prefix `llm_provider-`. `None`: no warnings."""
    found = _details(logging).get(WARNINGS)
    return {f"llm_provider-{HEADER}": header_text(found)} if found else None


def ending_keeper(logging: Any, *, clipped: bool) -> Callable[[Finish], None]:
    """`clipped`: the context left less room than `max_tokens`."""

    def keep(finish: Finish) -> None:
        _details(logging)[ENDING] = ending(finish, clipped=clipped)

    return keep


def with_ending(logging: Any, message: Any) -> Any:
    """`message`: complete, or an event of a stream."""
    fields = _details(logging).get(ENDING)
    if fields and isinstance(message, dict) and message.get("type") == "message":
        return {**message, **fields}
    if fields and isinstance(message, bytes) and message.startswith(LAST_EVENT):
        event = json.loads(message.partition(b"data: ")[2])
        return sse.named({**event, "delta": {**event["delta"], **fields}})
    return message


def _details(logging: Any) -> dict[str, Any]:
    details = getattr(logging, "model_call_details", None)
    return details if isinstance(details, dict) else {}
