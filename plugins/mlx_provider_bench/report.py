"""Parts of every benchmark's output: the description of the machine, and tables."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

Result = dict[str, Any]
WIDTH = 150  # columns of a table that goes to a file


def surroundings(dtype: str) -> Result:
    """The device, its BLAS, and the load of this machine. `dtype`: of the weights, in words."""
    import mlx.core as mx

    from mlx_provider.commands import active_blas
    from mlx_provider.cores import cores

    return {
        "device": str(mx.default_device()), "blas": active_blas(), "dtype": dtype,
        "cores": cores(), "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def print_rows(title: str, columns: Mapping[str, str], rows: Iterable[Result]) -> None:
    """A Markdown table on stderr; stdout is left to the JSON line. `columns`: heading -> key of a
    row, `a.b` for an entry of a nested one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell(_at(row, key)) for key in columns.values()))
    if table.row_count:
        console = Console(stderr=True)
        if not console.is_terminal:
            console.width = WIDTH
        console.print(table)


def _at(row: Any, key: str) -> Any:
    for part in key.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def cell(value: object) -> str:
    """A value in a table: four digits of a float, `-` for `None`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
