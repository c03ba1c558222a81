"""Shows a model's context in LiteLLM's `/v1/models` and `/model/info`."""

from __future__ import annotations

import sys
from typing import Any

from ..serving.facts import ModelFacts
from .abilities import LIMITS, enter


class EngineLimit(int):
    """A limit from an engine. All others under `model_info` are from the operator."""


def show(
    model: str, facts: ModelFacts, deployment: str | None = None, *, mode: str = "chat"
) -> None:
    """Add the facts that an engine has sent about a model.

    A context is written to the proxy's config entry with that id, because entries of one model can
    have different contexts; if there is none (a wildcard, a script), to LiteLLM's map of models.
    Values under `model_info` in a config have precedence.
    """
    shown = _entry(deployment)
    if shown is None:
        enter(model, facts, mode)
        return
    enter(model, ModelFacts(None, facts.vision, facts.reasoning), mode)
    for name in LIMITS[1:]:
        ours = shown.get(name) is None or isinstance(shown[name], EngineLimit)
        if facts.context_length and ours:
            shown[name] = EngineLimit(facts.context_length)


def _entry(deployment: str | None) -> dict[str, Any] | None:
    """`model_info` of the running proxy's config entry of this id, unless it is a wildcard.

    It is the router's own object, because LiteLLM does not list its copy for a request (1.106.2,
    router.py `get_model_listing_info`).
    """
    router = getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)
    found = router.get_model_info(deployment) if router is not None and deployment else None
    info = found.get("model_info") if found and "*" not in found["model_name"] else None
    return info if isinstance(info, dict) else None
