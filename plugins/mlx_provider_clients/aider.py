"""aider (names as in its sources 0.86.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .limits import REPLY_SECONDS

HISTORIES = ("INPUT_HISTORY_FILE", "CHAT_HISTORY_FILE")


def profile(gateway: Gateway) -> Profile:
    """By variables; no file is written beside the project's. Its folder is always `~/.aider`, so it
    gets another home; git still finds the user's."""
    model = f"openai/{gateway.model}"
    metadata = {
        "max_tokens": gateway.output,
        "max_input_tokens": gateway.context - gateway.output,
        "max_output_tokens": gateway.output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
        "supports_vision": gateway.images,
    }
    return Profile(
        {
            "HOME": str(gateway.folder),
            "GIT_CONFIG_GLOBAL": str(git_config(Path.home())),
            "OPENAI_API_BASE": f"{gateway.url}/v1",
            "OPENAI_API_KEY": gateway.key,
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_MODEL_METADATA_FILE": str(gateway.folder / "models.json"),
            **{f"AIDER_{name}": str(gateway.folder / name.lower()) for name in HISTORIES},
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_GITIGNORE": "false",
            "AIDER_TIMEOUT": str(REPLY_SECONDS),
        },
        files={"models.json": json.dumps({model: metadata}, indent=2)},
        hidden=("OPENAI_*", "AIDER_*"),
    )


def git_config(home: Path) -> Path:
    """The file that git reads for a user, one of two."""
    own, base = home / ".gitconfig", home / ".config" / "git" / "config"
    return base if base.is_file() and not own.is_file() else own


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    if url := content.get("openai-api-base"):
        yield ClientServer(str(url))


CLIENT = Client(
    "aider",
    command="aider",
    install="pip install aider-chat",
    profile=profile,
    prompt_bytes=2_800,
    serves="aider",
    settings=ClientSettings((), (".aider.conf.yml",), servers),
)
