"""Checks whether upstream has a class for an architecture, for a family's `matches`. Imports
nothing of mlx-vlm, and of mlx-lm only the requested module."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..upstream import mlx_lm


def known_to_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Raises `NotInstalled`."""
    return mlx_lm.supports(config)


def known_to_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm has a folder for this `config.json`. It may still fail to load."""
    kind = str(config.get("model_type", "")).lower().replace("-", "_")
    spec = PathFinder.find_spec("mlx_vlm") if kind else None
    places = (spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / "models" / kind).is_dir() for place in places)
