"""The many ways to ask for thoughts, as template variables and a budget."""

from __future__ import annotations

from typing import Any

from ...errors import BadRequest
from ...invalid import shown
from ...protocol.requests import RENDERER_ARGUMENTS
from .parameters import Parameters


def template_variables(params: Parameters) -> tuple[dict[str, Any], int | None]:
    """Variables for the chat template, and the budget of thought tokens. Precedence:
    `chat_template_kwargs`, `enable_thinking`, `thinking` (Anthropic), `reasoning_effort`
    (OpenAI)."""
    variables = _effort(params.take("reasoning_effort"))
    switches, budget = _thinking(params.mapping("thinking"))
    variables.update(switches)
    enabled = params.flag("enable_thinking")
    if enabled is not None:
        variables["enable_thinking"] = enabled
    verbosity = params.take("verbosity")
    if verbosity is not None:
        variables["verbosity"] = verbosity
    own = params.mapping("chat_template_kwargs")
    if taken := RENDERER_ARGUMENTS & own.keys():
        raise BadRequest(
            f"chat_template_kwargs cannot set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
        )
    asked = params.number("thinking_budget")
    return variables | own, budget if asked is None else asked


def _effort(value: object) -> dict[str, Any]:
    """OpenAI's word, or the object of the Responses API."""
    if isinstance(value, dict):
        value = value.get("effort")
    if value is None:
        return {}
    if not isinstance(value, str):
        raise BadRequest(
            f"reasoning_effort must be a word, got {shown(value)}", param="reasoning_effort"
        )
    if value in ("none", "disable"):
        return {"enable_thinking": False}
    return {"reasoning_effort": value, "enable_thinking": True}


def _thinking(value: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Anthropic's object: `enabled` with a budget, `adaptive`, or `disabled`."""
    if not value:
        return {}, None
    kind = value.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadRequest(
            f"thinking.type must be enabled, adaptive or disabled, got {shown(kind)}",
            param="thinking",
        )
    return {"enable_thinking": kind != "disabled"}, value.get("budget_tokens")
