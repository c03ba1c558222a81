"""Connects to an engine in this process, on this machine, or elsewhere, with one interface."""
