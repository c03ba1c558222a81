"""The identity of an engine process: shows a client that it needs another one. The engine itself
watches plugin files, because it knows its imports."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping

from .. import __version__
from ..config import PREFIX
from ..installed import installed_version
from ..registry.discovery import SELECTION
from ..upstream.device_variables import NAMES

OWN, PYTHON = "mlx-provider", "python"
NOT_THE_ENGINES = {
    *(PREFIX + name for name in ("API_KEY", "IDLE_TIMEOUT", "RUNTIME_DIR", "TRANSPORT")),
    *NAMES,
}
"""Secret variables, those without effect for clients of a running engine, and those that the engine
sets itself."""
OTHERS = (
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "PYTHONPATH",
)
"""Variables of other packages with effect on models, devices and code."""
MLX, WINDOW = "MLX_", "_SLIDING_WINDOW"
"""Prefix of MLX's variables, and suffix of variables that change what a model attends to."""
SECRET = ("HF_TOKEN",)


def identity(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Version, Python and settings, by name. Secrets as digests."""
    python = f"{sys.prefix} ({platform.python_version()})"
    names = [n for n in environ if n.startswith(MLX) or n.endswith(WINDOW) or n in OTHERS]
    return {OWN: __version__, PYTHON: python} | {
        name: _shown(name, environ[name])
        for name in names
        if name not in NOT_THE_ENGINES and (environ[name] or name == SELECTION)
    }


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Empty if the other side sends no identity."""
    if not theirs:
        return {}
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return {n: f"{n}: {theirs.get(n, 'unset')}, here {ours.get(n, 'unset')}" for n in names}


def summary(changed: Mapping[str, str]) -> str:
    return "; ".join(changed.values())


def is_left_behind() -> bool:
    """Whether another version is now installed, so that no engine of this version can start."""
    return installed_version(OWN) not in ("", __version__)


def _shown(name: str, value: str) -> str:
    if name not in SECRET:
        return value
    return "a secret with digest " + hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
