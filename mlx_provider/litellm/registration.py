"""Make LiteLLM know the provider, its hook, and what the shipped model can do."""

from __future__ import annotations

import litellm
from litellm import CustomLLM

from .errors import PROVIDER
from .hook import DeploymentHook
from .stamp import share_stamp

DEMO = f"{PROVIDER}/demo"

DEMO_CAPABILITIES = {
    "litellm_provider": PROVIDER,
    "mode": "chat",
    "max_tokens": 4096,
    "max_input_tokens": 4096,
    "max_output_tokens": 4096,
    "input_cost_per_token": 0.0,
    "output_cost_per_token": 0.0,
    "cache_read_input_token_cost": 0.0,
    "cache_creation_input_token_cost": 0.0,
    "supports_function_calling": True,
    "supports_tool_choice": True,
    "supports_response_schema": True,
    "supports_system_messages": True,
    "supports_prompt_caching": True,
    "supports_vision": True,
}


def register(handler: CustomLLM) -> None:
    """Enter provider, hook and capabilities into LiteLLM. Idempotent.

    A proxy's YAML replaces `custom_provider_map` afterwards with its own entries, so that the
    map entry serves scripts and the hook serves both. Compared by class name, because LiteLLM
    may run a handler's module a second time under another identity.
    """
    entries = litellm.custom_provider_map
    if not any(entry["provider"] == PROVIDER for entry in entries):
        entries.append({"provider": PROVIDER, "custom_handler": handler})
    litellm.utils.custom_llm_setup()
    if not any(
        type(callback).__name__ == DeploymentHook.__name__ for callback in litellm.callbacks
    ):
        litellm.logging_callback_manager.add_litellm_callback(DeploymentHook())
    litellm.register_model({DEMO: DEMO_CAPABILITIES})
    share_stamp()
