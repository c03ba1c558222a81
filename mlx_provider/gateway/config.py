"""The configuration of a LiteLLM proxy that serves one local model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..safe_open import create_own

TIMEOUT = 3600
"""Seconds. A prompt of 100,000 tokens may take half of that on a small machine."""
PING = 10
"""Seconds between keep-alive signals during a prefill."""
CLAIMED = (
    "supports_function_calling",
    "supports_parallel_function_calling",
    "supports_tool_choice",
    "supports_response_schema",
    "supports_prompt_caching",
)
"""Features of every model: the engine enforces the formats of calls and schemas."""


@dataclass(frozen=True)
class Served:
    name: str
    model: str
    """After `mlx/`: a Hub id, the absolute path of a folder, `demo`."""
    context: int
    """Tokens of prompt and answer."""
    output: int
    images: bool = False
    thinks: bool = False
    own_context: int | None = None
    """The model's context, if it differs."""

    def litellm_params(self) -> dict[str, Any]:
        """`max_tokens` limits the answer for a client that sets none."""
        return {
            "model": f"mlx/{self.model}",
            "max_tokens": self.output,
            "timeout": TIMEOUT,
            "stream_timeout": TIMEOUT,
        }

    def options(self) -> dict[str, Any]:
        return {} if self.own_context == self.context else {"context_length": self.context}

    def model_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "mode": "chat",
            "max_input_tokens": self.context,
            "max_output_tokens": self.output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            **dict.fromkeys(CLAIMED, True),
            "supports_vision": self.images,
            "supports_reasoning": self.thinks,
        }
        if options := self.options():
            info["mlx"] = options
        return info

    def entries(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """The model under its own name and these names, which may contain `*`."""
        return [
            {
                "model_name": name,
                "litellm_params": self.litellm_params(),
                "model_info": self.model_info(),
            }
            for name in (self.name, *names)
        ]


AGENTS = ("claude-*", "gpt-*")
"""Model names with which agents ask for titles, summaries, subagents."""
ANYTHING = ("*",)


def served_config(served: Served, names: tuple[str, ...]) -> dict[str, Any]:
    return {"model_list": served.entries(names), **_settings(ping=True)}


def subagent_config(served: Served, forwards: str) -> dict[str, Any]:
    """One model beside a client's main model of another provider.

    The client sends the proxy's key as `x-litellm-api-key`. LiteLLM passes on the token of the
    client's login (1.106.2, `clean_headers`), else takes the provider's key from the
    environment."""
    config = served_config(served, ())
    if forwards:
        name, params = forwards.partition("/")[2], {"model": forwards}
        config["model_list"].append({"model_name": name, "litellm_params": params})
        config["general_settings"]["forward_client_headers_to_llm_api"] = True
    return config


def proxy_config(name: str, model: str, **litellm_params: Any) -> dict[str, Any]:
    """Clients use `name`, the engine serves `mlx/<model>`. The proxy reads its master key from
    `LITELLM_MASTER_KEY`."""
    return {
        "model_list": [
            {
                "model_name": name,
                "litellm_params": {"model": f"mlx/{model}", **litellm_params},
                "model_info": {
                    "mode": "chat",
                    "input_cost_per_token": 0,
                    "output_cost_per_token": 0,
                    "supports_function_calling": True,
                },
            }
        ],
        **_settings(ping=False),
    }


def _settings(*, ping: bool) -> dict[str, Any]:
    provider = {"provider": "mlx", "custom_handler": "mlx_provider.litellm.handler"}
    litellm: dict[str, Any] = {"custom_provider_map": [provider]}
    if ping:
        litellm["sse_keepalive_ping_interval_seconds"] = PING
    return {
        "litellm_settings": litellm,
        "general_settings": {"cancel_on_disconnect": True, "disable_spend_logs": True},
        "router_settings": {"num_retries": 0},
    }


def write_config(config: Mapping[str, Any], folder: Path) -> Path:
    """As JSON, which is valid YAML."""
    path = folder / "config.yaml"
    with os.fdopen(create_own(path), "w") as file:
        file.write(json.dumps(config, indent=2) + "\n")
    return path
