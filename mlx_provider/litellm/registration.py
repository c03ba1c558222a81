"""Registers the provider, its hook and the abilities of the shipped model in LiteLLM."""

from __future__ import annotations

import litellm
from litellm import CustomLLM
from litellm.constants import LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS

from .errors import PROVIDER
from .hook import DeploymentHook
from .model_info import DEMOS, enter
from .patches import install


def register(handler: CustomLLM) -> None:
    """Idempotent. A proxy's YAML later replaces `custom_provider_map`: the map serves scripts, the
    hook both. Compared by class name, because LiteLLM can import a handler's module twice."""
    entries = litellm.custom_provider_map
    if not any(entry["provider"] == PROVIDER for entry in entries):
        entries.append({"provider": PROVIDER, "custom_handler": handler})
    litellm.utils.custom_llm_setup()
    if not any(
        type(callback).__name__ == DeploymentHook.__name__ for callback in litellm.callbacks
    ):
        litellm.logging_callback_manager.add_litellm_callback(DeploymentHook())
    for model, facts in DEMOS.items():
        enter(model, facts)
    _take_token_ids()
    install()


def _take_token_ids() -> None:
    """Let the proxy pass token ids for embeddings. For providers outside this list it converts them
    to text by OpenAI's tokenizer (1.106.2 and 1.109.1, `embeddings`)."""
    known = LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS
    if f"{PROVIDER}/" not in known:
        known.append(f"{PROVIDER}/")
