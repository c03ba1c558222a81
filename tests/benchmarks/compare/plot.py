"""Pictures of benchmark results."""

from __future__ import annotations

from typing import Any

from mlx_provider.errors import NotInstalled


def pyplot() -> Any:
    """Without a window. Raises `NotInstalled` where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as found
    except ImportError as error:
        raise NotInstalled("pictures need matplotlib: pip install matplotlib") from error
    return found
