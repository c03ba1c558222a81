"""Engines stepped in this process."""
