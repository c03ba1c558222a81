"""The proxy's route of a request, and whether the router has a fallback for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import PROVIDER

FALLBACKS = ("context_window_fallbacks", "fallbacks")


def route(litellm_params: Mapping[str, Any]) -> str:
    """The path of the proxy; empty for a script. LiteLLM stores it in `metadata` or
    `litellm_metadata` (1.106.2, `add_user_api_key_auth_to_request _metadata`), under a name that no
    client can set."""
    for name in ("metadata", "litellm_metadata"):
        found = (litellm_params.get(name) or {}).get("user_api_key_request_route")
        if isinstance(found, str):
            return found
    return ""


def deployment_of(request_data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`model_info` of our config entry that answers a request of the proxy; `None`: another
    provider's. LiteLLM stores the entry before it streams (1.106.2, `base_process_llm_request`)."""
    chosen = request_data.get("deployment")
    if chosen is None or not chosen.litellm_params.model.startswith(PROVIDER + "/"):
        return None
    return {"model_info": chosen.model_info.model_dump()}


def reads_errors_in_streams(litellm_params: Mapping[str, Any]) -> bool:
    """Whether the client of a stream reads a full context from its events. Codex does
    (`response.failed`), and ends its session after a status 400."""
    return route(litellm_params).endswith("/responses") and not _falls_back(litellm_params)


def _falls_back(litellm_params: Mapping[str, Any]) -> bool:
    """Whether the router can have a fallback for a prompt that is too long, and needs the error
    before the stream begins."""
    body = (litellm_params.get("proxy_server_request") or {}).get("body") or {}
    group = (litellm_params.get("metadata") or {}).get("model_group")
    router = getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)
    return any(
        body.get(name) or _names(getattr(router, name, None), group or body.get("model"))
        for name in FALLBACKS
    )


def _names(fallbacks: Any, group: Any) -> bool:
    """Whether a list of `{group: [others]}` has one for this group, or for all."""
    entries: Iterable[Any] = fallbacks if isinstance(fallbacks, list | tuple) else ()
    return any(isinstance(entry, Mapping) and {group, "*"} & entry.keys() for entry in entries)
