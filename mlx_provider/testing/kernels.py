"""The kernels that the engine would choose, for a model that a test has loaded by itself."""

from __future__ import annotations

from typing import TypeVar

from ..records import LoadedModel
from ..registry import PluginRegistry
from ..serving.kernels import equip

M = TypeVar("M", bound=LoadedModel)


def equipped(model: M) -> M:
    """The same model, with the best kernels of the plugins in use."""
    equip(model, PluginRegistry.discover())
    return model
