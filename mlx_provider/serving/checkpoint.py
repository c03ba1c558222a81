"""Data of a model from the small files of its checkpoint, before a load or a download."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadRequest
from ..families.checkpoint import named_template, read_json
from .hub import Outline, local_folder, outline


def checkpoint(model: str) -> Outline:
    """Raises the errors of `folder_of`, and `BadRequest` for a config that cannot be read."""
    folder = local_folder(model)
    if folder is None:
        return outline(model)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Outline(read_json(folder / "config.json"), weights, _template(folder), here=True)


def _template(folder: Path) -> str:
    """Empty if it cannot be read: the load reports the file."""
    try:
        return named_template(folder)
    except BadRequest:
        return ""
