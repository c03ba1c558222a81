"""Installed plugins, and what they bring."""

from .discovery import SELECTION
from .plugin import Plugin
from .registry import PluginRegistry

__all__ = ["SELECTION", "Plugin", "PluginRegistry"]
