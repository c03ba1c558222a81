"""Pictures of benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_provider.errors import NotInstalled


def pyplot() -> Any:
    """Without a window. Raises `NotInstalled` where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as found
    except ImportError as error:
        raise NotInstalled("pictures need matplotlib: pip install 'mlx-provider[bench]'") from error
    return found


def plot_engine(result: dict[str, Any], path: Path) -> None:
    """Decode rate by number of rows, one line per subject; PNG or SVG by the file's ending.

    Raises `NotInstalled` where matplotlib is missing.
    """
    plots = pyplot()
    decode: dict[str, Any] = result.get("decode", {})
    figure, axes = plots.subplots(figsize=(7, 4.5))
    names = list(next(iter(decode.values()))["tokens_per_second"]) if decode else []
    for name in names:
        rates = [each["tokens_per_second"][name] for each in decode.values()]
        axes.plot([int(rows) for rows in decode], rates, marker="o", label=name)
    axes.set_xlabel("rows of skewed lengths")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)
