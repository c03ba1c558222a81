"""OpenAI's parameters that LiteLLM lets through for OpenAI's own models, for ours.

For custom providers it refuses or drops some unless a call allows them by name, and a provider has
no way to say that it takes them (1.106.2 and 1.109.1, `utils.get_optional_params`; a method
`get_supported_openai_params` of a handler is not asked). Its hook for deployments runs on
asynchronous calls alone.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from litellm import main

from .errors import PROVIDER

ADMITTED = ("reasoning_effort", "thinking", "user", "verbosity")
MARK = "mlx_admits"


def admit_parameters() -> None:
    """Have them delivered by every call for our provider. Idempotent."""
    original = main.get_optional_params
    if hasattr(original, MARK):
        return

    @wraps(original)
    def get_optional_params(*args: Any, **given: Any) -> Any:
        if given.get("custom_llm_provider") == PROVIDER:
            given["allowed_openai_params"] = [
                *(given.get("allowed_openai_params") or ()),
                *ADMITTED,
            ]
        return original(*args, **given)

    setattr(get_optional_params, MARK, True)
    main.get_optional_params = get_optional_params
