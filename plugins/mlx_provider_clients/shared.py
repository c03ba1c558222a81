"""Numbers and texts of several profiles."""

from __future__ import annotations

PROVIDER = "mlx"
KEY = "MLX_GATEWAY_KEY"
"""Variable with the gateway's key, for clients whose files name a variable."""
SUBAGENT = "local"
SUBAGENT_TASKS = (
    "Searches and small edits at no cost, on a local model. Use it to find files and code, to read "
    "and summarise files, and for mechanical edits that are described exactly."
)
SUBAGENT_PROMPT = (
    "You do one small task in a code base for another agent: a search, a summary or an exact edit. "
    "Read only what the task needs. Reply with the result alone: paths, line numbers, and what you "
    "changed."
)
REPLY_SECONDS = 3600
"""Seconds without a token: a prompt of 100,000 tokens may take as long."""
