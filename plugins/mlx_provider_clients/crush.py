"""Crush (names as in `internal/config` and `schema.json` of charmbracelet/crush at 0.96)."""

from __future__ import annotations

import json

from mlx_provider import Client, Gateway, Profile

from .limits import KEY

PROVIDER = "mlx"
COSTS = ("cost_per_1m_in", "cost_per_1m_out", "cost_per_1m_in_cached", "cost_per_1m_out_cached")


def profile(gateway: Gateway) -> Profile:
    """One `crush.json`; its state, else in the project, goes into the same folder."""
    model = {
        "id": gateway.model,
        "name": gateway.model,
        **dict.fromkeys(COSTS, 0),
        "context_window": gateway.context,
        "default_max_tokens": gateway.output,
        "can_reason": False,
        "supports_attachments": gateway.images,
    }
    provider = {
        "name": "mlx-provider",
        "type": "openai-compat",
        "base_url": f"{gateway.url}/v1",
        "api_key": f"${KEY}",
        "models": [model],
    }
    chosen = {"provider": PROVIDER, "model": gateway.model}
    config = {
        "$schema": "https://charm.land/crush.json",
        "providers": {PROVIDER: provider},
        "models": {"large": chosen, "small": chosen},
        "options": {
            "data_directory": str(gateway.folder / "state"),
            "disable_provider_auto_update": True,
            "disable_default_providers": True,
            "disable_metrics": True,
        },
    }
    return Profile(
        {
            "CRUSH_GLOBAL_CONFIG": str(gateway.folder),
            "CRUSH_GLOBAL_DATA": str(gateway.folder / "data"),
            "CRUSH_CACHE_DIR": str(gateway.folder / "cache"),
            KEY: gateway.key,
        },
        files={"crush.json": json.dumps(config, indent=2)},
        hidden=("CRUSH_*",),
    )


CLIENT = Client(
    "crush",
    command="crush",
    install="npm install -g @charmland/crush",
    profile=profile,
    serves="Crush",
)
