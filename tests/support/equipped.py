"""The kernels that the engine would choose, for a model that a test has loaded by itself."""

from typing import TypeVar

from mlx_provider.records import LoadedModel
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.loader import equip

M = TypeVar("M", bound=LoadedModel)


def equipped(model: M) -> M:
    """The same model, with the best kernels of the plugins in use."""
    equip(model, PluginRegistry.discover())
    return model
