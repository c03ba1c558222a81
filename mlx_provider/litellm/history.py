"""Checks `previous_response_id`. If LiteLLM does not find the conversation in its spend logs, it
continues without it (1.106.2, `ResponsesSessionHandler`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..errors import BadRequest

PROXY = "litellm.proxy.proxy_server"


async def check_history(kwargs: Mapping[str, Any]) -> None:
    """Raises `BadRequest` if the conversation is not found."""
    name = kwargs.get("previous_response_id")
    if name and not await _stored(name):
        raise BadRequest(
            "previous_response_id: no messages are stored for this response; send the whole "
            "conversation as input, or let LiteLLM store responses (a database, and "
            "store_prompts_in_spend_logs: true under general_settings)",
            param="previous_response_id",
        )


async def _stored(name: str) -> bool:
    """Whether LiteLLM will find messages. Only for a proxy with a database."""
    if getattr(sys.modules.get(PROXY), "prisma_client", None) is None:
        return False
    from litellm.responses.litellm_completion_transformation.session_handler import (
        ResponsesSessionHandler,
    )

    find = ResponsesSessionHandler.get_chat_completion_message_history_for_previous_response_id
    return bool((await find(name)).get("messages"))
