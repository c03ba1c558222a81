"""The configuration of a LiteLLM proxy that serves one local model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def proxy_config(name: str, model: str, **litellm_params: Any) -> dict[str, Any]:
    """A proxy's config: clients say `name`, the engine serves `mlx/<model>`.

    The master key is not in it: the proxy takes that from `LITELLM_MASTER_KEY`.
    """
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
        "litellm_settings": {
            "custom_provider_map": [
                {"provider": "mlx", "custom_handler": "mlx_provider.litellm.handler"}
            ],
        },
        "general_settings": {"cancel_on_disconnect": True, "disable_spend_logs": True},
        "router_settings": {"num_retries": 0},
    }


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """The config as a file in `folder`. JSON is YAML, so that no YAML writer is needed."""
    path = folder / "config.yaml"
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path
