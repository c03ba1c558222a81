"""Connects chat and engine: keeps models in memory, and prepares requests for their engines."""
