"""Checkpoints of a backbone without an output matrix, as published for embedding models.

Their weight names lack the complete model's prefix; mlx-lm 0.32.2 (mlx_lm/utils.py, `load_model`)
refuses them.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

BACKBONE, HEAD = "model", "lm_head"


def whole_names(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights under the names of the complete model, which then uses its embedding as output
    matrix. Weights of a complete model do not change."""
    backbone, given = model.get(BACKBONE), set(map(_first, weights))
    if not isinstance(backbone, nn.Module) or BACKBONE in given:
        return weights
    parts = {_first(name) for name, _ in tree_flatten(backbone.parameters())}
    if not parts <= given:
        return weights
    if HEAD in model and HEAD not in given and hasattr(model.args, "tie_word_embeddings"):
        model.args.tie_word_embeddings = True
        del model[HEAD]
    return {
        f"{BACKBONE}.{name}" if _first(name) in parts else name: value
        for name, value in weights.items()
    }


def _first(name: str) -> str:
    return name.partition(".")[0]
