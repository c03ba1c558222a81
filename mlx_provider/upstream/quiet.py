"""What transformers tells on its own is kept from terminals and logs: it is not about a request."""

from __future__ import annotations

import os


def quiet_transformers() -> None:
    """Errors alone, unless the user has chosen. Before transformers is imported, which reads it.

    It would say that there is no PyTorch, and which keys of a `config.json` it does not know
    (transformers 5.23, `utils/logging.py`).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
