"""Installed plugins and their records."""

from .discovery import SELECTION, Plugin, canonical, installed
from .registry import PluginRegistry

__all__ = ["SELECTION", "Plugin", "PluginRegistry", "canonical", "installed"]
