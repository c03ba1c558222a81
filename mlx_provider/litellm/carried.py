"""Parameters that LiteLLM would lose, under names that it lets through."""

from __future__ import annotations

from typing import Any

from ..wire.openai.prompts import listed

STOP_LIMIT = 4
"""LiteLLM cuts longer `stop` lists silently (1.106.2, `validate_openai_optional_params`)."""
STOP = "mlx_stop"
PROMPTS = "mlx_prompt"


def carry_stop(kwargs: dict[str, Any]) -> None:
    stop = kwargs.get("stop")
    if isinstance(stop, list) and len(stop) > STOP_LIMIT:
        kwargs[STOP] = kwargs.pop("stop")


def carry_prompts(kwargs: dict[str, Any]) -> None:
    """Carry lists that hold token ids past LiteLLM, which knows only texts here.

    Raises `BadRequest` for what is no prompt: LiteLLM would answer with a traceback.
    """
    prompts = listed(kwargs.get("prompt"), "prompt")
    if not all(isinstance(each, str) for each in prompts):
        kwargs[PROMPTS], kwargs["prompt"] = prompts, ""
