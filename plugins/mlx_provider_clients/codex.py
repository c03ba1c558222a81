"""Codex CLI (names as in its binary 0.169.0)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .nested import KEY, REPLY_SECONDS, count, mapping

PROVIDER = "mlx"
TEMPORARY = "tmp"


def profile(gateway: Gateway) -> Profile:
    settings = {
        "model": gateway.model,
        "model_provider": PROVIDER,
        "model_context_window": gateway.context,
        # The rest must be enough for the answer and for the request for a summary.
        "model_auto_compact_token_limit": gateway.context - gateway.output,
        "check_for_update_on_startup": False,
    }
    provider = {
        "name": "mlx-provider",
        "base_url": f"{gateway.url}/v1",
        "env_key": KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": REPLY_SECONDS * 1000,
    }
    lines = [*_toml(settings), "[analytics]", "enabled = false"]
    lines += [f"[model_providers.{PROVIDER}]", *_toml(provider)]
    return Profile(
        {
            "CODEX_HOME": str(gateway.folder),
            # It makes its helpers (`apply_patch`) in no home below the folder for temporary files.
            "TMPDIR": str(gateway.folder / TEMPORARY),
            KEY: gateway.key,
        },
        files={"config.toml": "\n".join(lines) + "\n", f"{TEMPORARY}/.made": ""},
        hidden=("OPENAI_*", "CODEX_*"),
    )


def _toml(values: dict[str, object]) -> list[str]:
    """Texts, numbers and booleans are the same in JSON and TOML."""
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    chosen = mapping(content, "model_providers", str(content.get("model_provider")))
    if url := chosen.get("base_url"):
        yield ClientServer(str(url), count(content.get("model_context_window")))


CODEX = Client(
    "codex",
    command="codex",
    install="npm install -g @openai/codex",
    profile=profile,
    prompt_bytes=39_500,
    api="responses",
    serves="Codex CLI",
    settings=ClientSettings((), ("$CODEX_HOME/config.toml", ".codex/config.toml"), servers),
)
