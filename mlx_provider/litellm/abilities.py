"""Entries of LiteLLM's map of models for our models.

LiteLLM's `supports_*`, `get_model_info` and `completion_cost` read them, and so do `/v1/models` and
`/model/info` for fields that a config entry lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import litellm

from ..protocol.events import Accepted
from ..serving.facts import ModelFacts
from .errors import PROVIDER

COSTS = (
    "input_cost_per_token",
    "output_cost_per_token",
    "cache_read_input_token_cost",
    "cache_creation_input_token_cost",
)
EVERY_MODEL = {
    "litellm_provider": PROVIDER,
    "mode": "chat",
    **dict.fromkeys(COSTS, 0.0),
    "supports_function_calling": True,
    "supports_parallel_function_calling": True,
    "supports_tool_choice": True,
    "supports_response_schema": True,
    "supports_system_messages": True,
    "supports_prompt_caching": True,
}
"""Calls and schemas are enforced token by token, whatever the model was trained for."""
_OTHER: Mapping[str, Mapping[str, Any]] = {
    "embedding": {name: False for name in EVERY_MODEL if name.startswith("supports_")}
}
"""What is otherwise of a model that does not chat."""
OWN_CONTEXT = "mlx_context_length"
"""The model's own context in an entry, whose limits the router replaces by those of whichever
config entry comes last."""
LIMITS = ("max_tokens", "max_input_tokens", "max_output_tokens")
DEMOS = dict.fromkeys(("demo", "demo-hybrid"), ModelFacts(65_536, vision=True, reasoning=False))


def model_facts(accepted: Accepted) -> ModelFacts:
    """The facts about a model in an engine's `Accepted`."""
    return ModelFacts(accepted.context_length, accepted.vision, accepted.reasoning)


def known(model: str) -> Mapping[str, Any]:
    """LiteLLM's entry of a model; empty: none."""
    return litellm.model_cost.get(f"{PROVIDER}/{model}") or {}


def enter(model: str, facts: ModelFacts, mode: str = "chat") -> None:
    """Add a model, or new facts about it. Of several contexts, the widest is shown."""
    before = known(model)
    fields: dict[str, Any] = {} if before else {**EVERY_MODEL, "mode": mode, **_OTHER.get(mode, {})}
    if (facts.context_length or 0) > (before.get("max_input_tokens") or 0):
        fields |= dict.fromkeys((*LIMITS, OWN_CONTEXT), facts.context_length)
    for name, value in (("vision", facts.vision), ("reasoning", facts.reasoning)):
        if value is not None and before.get(f"supports_{name}") is None:
            fields[f"supports_{name}"] = value
    if fields:
        litellm.register_model({f"{PROVIDER}/{model}": {"litellm_provider": PROVIDER, **fields}})
