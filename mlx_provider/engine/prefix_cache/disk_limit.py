"""The disk space of the prefix cache. Imports no mlx."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = "prefixes"
SHARE = 0.1
"""Share of the space that is free without the prefix cache."""
MOST_BYTES = 20 * 10**9


def disk_limit(folder: Path, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    return min(MOST_BYTES, int(SHARE * (shutil.disk_usage(place).free + held(folder))))


def held(folder: Path) -> int:
    sizes = []
    for path in (folder / FOLDER).glob("*"):
        try:
            sizes.append(used(path.lstat()))
        except FileNotFoundError:  # another process removed it
            continue
    return sum(sizes)


def used(file: os.stat_result) -> int:
    """Allocated bytes: holes take none."""
    return min(file.st_size, 512 * file.st_blocks)
