"""A model that is another one, but for what a subclass changes."""

from dataclasses import dataclass
from typing import Any

from mlx_provider.records import LoadedModel


@dataclass
class WrappedModel:
    inner: LoadedModel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
