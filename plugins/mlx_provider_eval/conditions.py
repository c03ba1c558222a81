"""The conditions of a measurement in addition to the model, so that readers can repeat it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from mlx_provider.commands import installed_version

from .stage import Staged

PACKAGES = (
    "mlx-provider",
    "mlx",
    "mlx-lm",
    "mlx-vlm",
    "transformers",
    "tokenizers",
    "litellm",
    "openai",
)


def conditions() -> dict[str, Any]:
    """Time, command and versions of this run."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlx-provider", *sys.argv[1:]]),
        "versions": {name: number for name in PACKAGES if (number := installed_version(name))},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def of_subject(staged: Staged) -> dict[str, Any]:
    """The parts that serve one subject."""
    status, health = staged.status, staged.health()
    return {
        **staged.subject.encoded(),
        "device": health.device,
        "family": f"{status.family} of plugin {status.plugin}",
        "model_type": status.model_type,
        "weights_bytes": status.weights_bytes,
        "context_length": status.context_length,
        "tool_parser": status.tool_parser,
        "reasoning_parser": status.reasoning_parser,
        "drafter": status.drafter,
        "notes": status.notes,
    }
