"""Tiny models with random weights, for tests of plugins: `build` writes a folder in a second."""

from .configs import FAMILIES, TinyFamily
from .models import build, checkpoints_for, family_named

__all__ = ["FAMILIES", "TinyFamily", "build", "checkpoints_for", "family_named"]
