"""The command `mlx-provider`."""

from .app import main

__all__ = ["main"]
