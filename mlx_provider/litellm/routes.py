"""Which of the proxy's routes a request came by, and whether another model would take it over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import PROVIDER

FALLBACKS = ("context_window_fallbacks", "fallbacks")


def route(litellm_params: Mapping[str, Any]) -> str:
    """The path that the proxy's client called; empty for a script.

    LiteLLM notes it in `metadata` or `litellm_metadata` (1.106.2, `add_user_api_key_auth_to_request
    _metadata`), under a name that no client can set.
    """
    for name in ("metadata", "litellm_metadata"):
        found = (litellm_params.get(name) or {}).get("user_api_key_request_route")
        if isinstance(found, str):
            return found
    return ""


def deployment_of(request_data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`model_info`, as `operator_options` takes it, of the config entry of ours that answers a
    request of the proxy; `None`: it is another provider's.

    LiteLLM notes the entry before it streams (1.106.2, `base_process_llm_request`).
    """
    chosen = request_data.get("deployment")
    if chosen is None or not chosen.litellm_params.model.startswith(PROVIDER + "/"):
        return None
    return {"model_info": chosen.model_info.model_dump()}


def reads_errors_in_streams(litellm_params: Mapping[str, Any]) -> bool:
    """Whether a streamed request's client looks for a full context in its events.

    Codex does (`response.failed`), and takes an error of status 400 for the end of its session.
    """
    return route(litellm_params).endswith("/responses") and not _falls_back(litellm_params)


def _falls_back(litellm_params: Mapping[str, Any]) -> bool:
    """Whether the router may know another model for a prompt that is too long: it must see the
    error before the stream begins."""
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
