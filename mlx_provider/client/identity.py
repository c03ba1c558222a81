"""What an engine process was started as, so that a client can see that it is out of date."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from .. import __version__
from ..config import PREFIX
from ..registry.discovery import SELECTION

UPSTREAM = ("mlx", "mlx-lm", "mlx-vlm", "transformers")
NOT_THE_ENGINES = frozenset(
    PREFIX + name for name in ("API_KEY", "IDLE_TIMEOUT", "RUNTIME_DIR", "TRANSPORT")
)
"""Variables that are secret, or that do not change what a running engine does for a client."""


def identity(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Versions, plugins with the age of their files, and settings, by name."""
    found = {"mlx-provider": __version__, **dict(_upstream()), **dict(_plugins())}
    settings = {n: v for n, v in environ.items() if n.startswith(PREFIX) and (v or n == SELECTION)}
    return found | {n: v for n, v in settings.items() if n not in NOT_THE_ENGINES}


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What is not the same, in words; empty where the other side does not say what it is."""
    if not theirs:
        return []
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return [f"{n}: {theirs.get(n, 'none')}, now {ours.get(n, 'none')}" for n in names]


def _upstream() -> Iterator[tuple[str, str]]:
    for name in UPSTREAM:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _plugins() -> Iterator[tuple[str, str]]:
    for point in entry_points(group="mlx_provider"):
        owner = point.dist
        if owner is not None and owner.name != "mlx-provider":
            yield f"plugin {point.name}", f"{owner.name} {owner.version} {_age(point.module)}"


def _age(module: str) -> int:
    """When the newest source file of a module or package was written, in nanoseconds."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        return 0
    origin = Path(spec.origin)
    files = origin.parent.rglob("*.py") if spec.submodule_search_locations else [origin]
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)
