"""Models that a test loads by itself, and the kernels that the engine would choose for them."""

from pathlib import Path
from typing import Any, TypeVar

import mlx.nn as nn

from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.families.checkpoint import read_json
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.loader import equip

M = TypeVar("M", bound=LoadedModel)


def load_by_family(folder: Path, **options: Any) -> LoadedModel:
    """By the plugin that recognises it, whichever plugins are in use."""
    family, _ = PluginRegistry.discover({}).family_for(read_json(folder / "config.json"))
    return family.load(folder, LoadOptions(**options))


def equipped(model: M) -> M:
    """The same model, with the best kernels of the plugins in use."""
    equip(model, PluginRegistry.discover())
    return model


def in_four_bits(model: M) -> M:
    """The same model: its text part is quantised where the width permits."""
    whole: Any = vars(model)["model"]
    nn.quantize(
        getattr(whole, "language_model", whole),
        group_size=32,
        bits=4,
        class_predicate=lambda _, layer: (
            hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0
        ),
    )
    return model
