"""Figures that the profiles share."""

from __future__ import annotations

KEY = "MLX_GATEWAY_KEY"
"""Variable with the gateway's key, for clients whose files name a variable."""
REPLY_SECONDS = 3600
"""Seconds without a token that a client is to bear: a prompt of 100,000 tokens may take as long."""
