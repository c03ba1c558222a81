"""A model's context, shown where LiteLLM's clients look for it: `/v1/models`, `/model/info`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import litellm

from .errors import PROVIDER

LIMITS = ("max_tokens", "max_input_tokens", "max_output_tokens")


class Told(int):
    """A limit that an engine told; any other one under `model_info` is the operator's."""


def show_context(model: str, length: int | None, deployment: str | None = None) -> None:
    """Enter a context (tokens) that an engine told.

    It goes to the proxy's config entry of that id, since entries of one model may differ in it.
    Where there is none (a wildcard, a script), it goes to LiteLLM's map of models, whose widest
    one stays. What a config says under `model_info` outranks both.
    """
    if length is None:
        return
    shown = _entry(deployment)
    if shown is None:
        _enter(model, dict.fromkeys(LIMITS, length))
        return
    _enter(model, {})
    for name in LIMITS[1:]:
        if shown.get(name) is None or isinstance(shown[name], Told):
            shown[name] = Told(length)


def _enter(model: str, limits: Mapping[str, int]) -> None:
    """Make a model known to the map, without which LiteLLM cannot tell that it costs nothing."""
    name = f"{PROVIDER}/{model}"
    known = litellm.model_cost.get(name)
    if known is None or limits.get("max_input_tokens", 0) > (known.get("max_input_tokens") or 0):
        litellm.register_model({name: {"litellm_provider": PROVIDER, "mode": "chat", **limits}})


def _entry(deployment: str | None) -> dict[str, Any] | None:
    """`model_info` of the running proxy's config entry of this id, unless it is a wildcard.

    The router's own object: its copy for a request is not what is listed (litellm 1.106.2,
    router.py `get_model_listing_info`).
    """
    router = getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)
    found = router.get_model_info(deployment) if router is not None and deployment else None
    info = found.get("model_info") if found and "*" not in found["model_name"] else None
    return info if isinstance(info, dict) else None
