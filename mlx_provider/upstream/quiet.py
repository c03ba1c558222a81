"""Hides messages of transformers that do not concern a request."""

from __future__ import annotations

import os


def quiet_transformers() -> None:
    """Let transformers log only errors, unless the user has set its level. Call it before its
    import. It warns about missing PyTorch and unknown keys of a `config.json` (transformers
    5.23, `utils/logging.py`)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
