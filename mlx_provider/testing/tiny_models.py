"""The old name of `mlx_provider.testing.tiny`; is removed in version 0.3."""

import warnings

from .tiny import FAMILIES, TinyFamily, build, family_named

__all__ = ["FAMILIES", "TinyFamily", "build", "family_named"]

warnings.warn(
    "mlx_provider.testing.tiny_models is mlx_provider.testing.tiny now", DeprecationWarning, 2
)
