"""Installed plugins and their records."""

from .discovery import SELECTION, installed
from .names import canonical
from .plugin import Plugin
from .registry import PluginRegistry

__all__ = ["SELECTION", "Plugin", "PluginRegistry", "canonical", "installed"]
