"""Installed plugins and their records."""

from .discovery import SELECTION, Plugin, canonical, find_plugins
from .registry import PluginRegistry

__all__ = ["SELECTION", "Plugin", "PluginRegistry", "canonical", "find_plugins"]
