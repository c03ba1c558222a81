"""Passes parameters that LiteLLM would drop under names that it does not drop."""

from __future__ import annotations

from typing import Any

from ..wire.openai.prompts import listed

STOP_LIMIT = 4
"""LiteLLM cuts longer `stop` lists silently (1.106.2, `validate_openai_optional_params`)."""
STOP = "mlx_stop"
PROMPTS = "mlx_prompt"
RETENTION = "mlx_retention"
IGNORED = "mlx_ignored"
"""Names of parts of a bridged request's tools without effect."""


def carry_stop(kwargs: dict[str, Any]) -> None:
    stop = kwargs.get("stop")
    if isinstance(stop, list) and len(stop) > STOP_LIMIT:
        kwargs[STOP] = kwargs.pop("stop")


def carry_retention(kwargs: dict[str, Any]) -> None:
    """LiteLLM knows this parameter and passes it to no handler (1.106.2, `completion`)."""
    if kwargs.get("prompt_cache_retention") is not None:
        kwargs[RETENTION] = kwargs.pop("prompt_cache_retention")


def carry_prompts(kwargs: dict[str, Any]) -> None:
    """LiteLLM passes only texts here, no lists of token ids. Raises `BadRequest` for an invalid
    prompt, to which LiteLLM would answer with a traceback."""
    prompts = listed(kwargs.get("prompt"), "prompt")
    if not all(isinstance(each, str) for each in prompts):
        kwargs[PROMPTS], kwargs["prompt"] = prompts, ""
