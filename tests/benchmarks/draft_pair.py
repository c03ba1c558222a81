"""A model and a smaller one that mostly says the same, for drafts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from random_weights import write_model

ADDING = ("o_proj.weight", "down_proj.weight")
"""Weights whose products a layer adds to its input."""
WEAK = 0.03
"""Factor on them in layers that are to change little."""


def write_pair(folder: Path, dtype: str, hidden: int, layers: int, first: int) -> tuple[Path, Path]:
    """Folders of a model and of one that has its first layers alone, and mostly says the same:
    what the other layers add is weak."""
    import mlx.core as mx

    large = write_model(folder / "large", "qwen3", dtype, hidden, layers)
    path = large / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    weights = {
        name: WEAK * value if _layer(name) >= first and name.endswith(ADDING) else value
        for name, value in weights.items()
    }
    small = Path(shutil.copytree(large, folder / "small"))
    kept = {name: value for name, value in weights.items() if _layer(name) < first}
    for where, these in ((path, weights), (small / path.name, kept)):
        mx.eval(these)
        mx.save_safetensors(str(where), these, metadata={"format": "mlx"})
    config = json.loads((small / "config.json").read_text()) | {"num_hidden_layers": first}
    (small / "config.json").write_text(json.dumps(config))
    return large, small


def _layer(name: str) -> int:
    """Of a weight; -1: of none."""
    found = re.search(r"layers[.](\d+)[.]", name)
    return int(found[1]) if found else -1
