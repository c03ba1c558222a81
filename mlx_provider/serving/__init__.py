"""Connects chat and engine: models in memory, and requests from their arrival to their rows."""
