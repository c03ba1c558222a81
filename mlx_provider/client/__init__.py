"""Connects to an engine on this machine or elsewhere, with one interface."""
