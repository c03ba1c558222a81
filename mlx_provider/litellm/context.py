"""A model's context, shown where LiteLLM's clients look for it: `/v1/models`, `/model/info`."""

from __future__ import annotations

import litellm

from .errors import PROVIDER


def show_context(model: str, length: int | None) -> None:
    """Enter a context (tokens) that an engine told into LiteLLM's map of models.

    The widest one stays, as LiteLLM lists a group of deployments; what a config says under
    `model_info` outranks the map.
    """
    name = f"{PROVIDER}/{model}"
    known = litellm.model_cost.get(name, {}).get("max_input_tokens") or 0
    if length is None or length <= known:
        return
    limits = dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"), length)
    litellm.register_model({name: {"litellm_provider": PROVIDER, "mode": "chat", **limits}})
