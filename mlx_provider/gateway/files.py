"""`config.yaml` and `.env` of a proxy that its operator manages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from .config import AGENTS, Served, served_config
from .proxy import master_key

CONFIG, ENV = "config.yaml", ".env"
START = "set -a; . ./.env; set +a; litellm --config config.yaml --host 127.0.0.1"
NOTES = {
    "max_tokens": "of an answer, if a client sets none",
    "timeout": "seconds: a long prompt may take minutes",
    "sse_keepalive_ping_interval_seconds": "keep-alive signals during a prefill",
    "cancel_on_disconnect": "ends a request when its client disconnects",
    "custom_provider_map": "replaces the whole list: include your other custom providers",
    "num_retries": "agents retry themselves",
}
"""Comments at the first use of each setting."""


def config_text(served: Served, limited_by: str = "") -> str:
    """YAML with comments. `limited_by`: why no longer context is set."""
    head = f"# A LiteLLM proxy for a local model. Start it: {START}"
    notes = NOTES | {"max_input_tokens": limited_by}
    return "\n".join([head, *_noted(_yaml(served_config(served, AGENTS)), notes)]) + "\n"


def env_text() -> str:
    """With a fresh master key, which LiteLLM needs to start."""
    lines = [
        f"LITELLM_MASTER_KEY={master_key()}",
        "# Otherwise each start downloads a price list.",
        "LITELLM_LOCAL_MODEL_COST_MAP=True",
        "# Seconds; default 5. With --num_workers, uvicorn kills a worker that imports for longer.",
        "TIMEOUT_WORKER_HEALTHCHECK=60",
    ]
    return "\n".join(lines) + "\n"


def write_pair(folder: Path, served: Served, *, limited_by: str, force: bool) -> list[Path]:
    """`.env` only for this user. Raises `BadRequest` for a file that exists."""
    contents = {ENV: env_text(), CONFIG: config_text(served, limited_by)}
    paths = [folder / name for name in contents]
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there and not force:
        raise BadRequest(f"{' and '.join(there)} would be overwritten: add --force to allow it")
    for path, content in zip(paths, contents.values(), strict=True):
        _write(path, content, 0o600 if path.name == ENV else 0o644)
    return paths


def _write(path: Path, content: str, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a new file, so that no process holds the old one open
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}") from None


def _yaml(value: Mapping[str, Any], indent: str = "") -> list[str]:
    lines: list[str] = []
    for key, each in value.items():
        name = key if key.replace("_", "").isalnum() else json.dumps(key)
        if isinstance(each, Mapping):
            lines += [f"{indent}{name}:", *_yaml(each, indent + "  ")]
        elif isinstance(each, list) and isinstance(each[0], Mapping):
            lines.append(f"{indent}{name}:")
            for item in each:
                first, *rest = _yaml(item, indent + "  ")
                lines += [f"{indent}- {first.strip()}", *rest]
        else:
            lines.append(f"{indent}{name}: {json.dumps(each, ensure_ascii=False)}")
    return lines


def _noted(lines: list[str], notes: Mapping[str, str]) -> list[str]:
    left = dict(notes)
    return [
        f"{line}  # {note}" if (note := left.pop(line.strip(" -").partition(":")[0], "")) else line
        for line in lines
    ]
