"""The Messages API of Anthropic: its parameters as chat, and our events as JSON."""
