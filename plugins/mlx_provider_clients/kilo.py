"""Kilo Code's CLI, a fork of OpenCode (names as in its binary 7.7.7)."""

from __future__ import annotations

from mlx_provider import Client, Gateway, Profile

from .limits import KEY
from .opencode import config, folders


def profile(gateway: Gateway) -> Profile:
    return Profile(
        {
            **folders(gateway),
            "KILO_CONFIG": str(gateway.folder / "kilo.json"),
            "KILO_DISABLE_AUTOUPDATE": "1",
            "KILO_DISABLE_MODELS_FETCH": "1",
            "KILO_DISABLE_SESSION_INGEST": "1",
            "KILO_TELEMETRY_LEVEL": "off",
            "KILO_NO_DAEMON": "1",
            KEY: gateway.key,
        },
        files={"kilo.json": config(gateway)},
        hidden=("KILO_*",),
    )


CLIENT = Client(
    "kilo",
    command="kilo",
    install="npm install -g @kilocode/cli",
    profile=profile,
    prompt_bytes=50_000,
    aliases=("kilocode",),
    serves="Kilo Code",
)
