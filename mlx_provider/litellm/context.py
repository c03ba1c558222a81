"""A model's context, shown where LiteLLM's clients look for it: `/v1/models`, `/model/info`."""

from __future__ import annotations

import sys
from typing import Any

from ..serving.facts import ModelFacts
from .abilities import LIMITS, enter


class EngineLimit(int):
    """A limit of an engine; any other one under `model_info` is the operator's."""


def show(
    model: str, facts: ModelFacts, deployment: str | None = None, *, mode: str = "chat"
) -> None:
    """Enter what an engine told of a model.

    A context goes to the proxy's config entry of that id, since entries of one model may differ in
    it, else (a wildcard, a script) to LiteLLM's map of models. What a config says under
    `model_info` outranks both.
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

    The router's own object: its copy for a request is not what is listed (litellm 1.106.2,
    router.py `get_model_listing_info`).
    """
    router = getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)
    found = router.get_model_info(deployment) if router is not None and deployment else None
    info = found.get("model_info") if found and "*" not in found["model_name"] else None
    return info if isinstance(info, dict) else None
