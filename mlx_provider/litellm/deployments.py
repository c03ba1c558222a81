"""Adds missing fields to config entries: costs of 0, the context, the model's abilities.

It also stores the model that the entry names, before a client's text replaces a `*`. LiteLLM adds
the values under an entry's `model_info` to its map of models.
"""

from __future__ import annotations

from typing import Any

from ..errors import BadRequest
from ..registry import PluginRegistry
from ..serving.facts import ModelFacts, facts_of
from .abilities import COSTS, LIMITS, OWN_CONTEXT, enter, known
from .context import EngineLimit
from .errors import PROVIDER
from .operator import CONFIGURED, Configured, operator_options

FILLED = (*COSTS, *LIMITS[1:])
"""Costs of cached tokens, too: without them LiteLLM warns of every entry that has others."""


def describe(entry: Any) -> None:
    """Add the fields that one of our entries lacks."""
    model = entry.litellm_params.model.removeprefix(PROVIDER + "/")
    if not isinstance(getattr(entry.model_info, CONFIGURED, None), Configured):
        setattr(entry.model_info, CONFIGURED, Configured(model))
    missing = [name for name in FILLED if getattr(entry.model_info, name, None) is None]
    if "*" in model or not missing:  # LiteLLM makes a new deployment of the entry for each request
        return
    if not known(model):
        # the folder is on another machine
        local = not entry.litellm_params.api_base
        enter(model, facts_of(model, PluginRegistry.discover) if local else ModelFacts())
    length = _chosen_context(entry.model_info) or known(model).get(OWN_CONTEXT)
    values = dict.fromkeys(COSTS, 0.0)
    if length is not None:
        values |= dict.fromkeys(LIMITS[1:], EngineLimit(length))
    for name in missing:
        setattr(entry.model_info, name, values.get(name))


def _chosen_context(model_info: Any) -> int | None:
    """The operator's `context_length`. Each request reports invalid options."""
    try:
        return operator_options({"model_info": model_info.model_dump()}).context_length
    except BadRequest:
        return None
