"""Reach an engine: in this process, on this machine, or elsewhere, through one interface."""

from .generation import EngineClient, Generation

__all__ = ["EngineClient", "Generation"]
