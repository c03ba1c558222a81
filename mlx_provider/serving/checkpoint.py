"""Data of a model from the small files of its checkpoint, before a load or a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..families.checkpoint import read_json
from .hub import TEMPLATE, TEMPLATES, local_folder, outline


@dataclass(frozen=True)
class Checkpoint:
    """The data of a model that is not loaded."""

    config: Mapping[str, Any]
    weight_bytes: int
    chat_template: str
    here: bool
    """Whether it is on this machine."""


def checkpoint(model: str) -> Checkpoint:
    """The data of a model on this machine, or on the Hub, of which the small files are read.

    Raises the errors of `folder_of`.
    """
    folder = local_folder(model)
    if folder is not None:
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return Checkpoint(read_json(folder / "config.json"), weights, _template(folder), here=True)
    found = outline(model)
    return Checkpoint(found.config, found.weight_bytes, found.chat_template, here=False)


def _template(folder: Path) -> str:
    """The chat template's text. Empty if there is none, or if there are several by name."""
    try:
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    except OSError:
        pass
    for name in TEMPLATES:
        try:
            found = read_json(folder / name).get("chat_template")
        except BadRequest:
            continue
        if isinstance(found, str):
            return found
    return ""
