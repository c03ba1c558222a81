"""Lets processes find the family without an installation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ... import __version__

DISTRIBUTION = "mlx_provider_scripted"


def environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which a process finds the family in addition to the installed plugins. Writes
    into `folder` the files that pip would install for this plugin, and puts the folder first on the
    `PYTHONPATH` of `environ`."""
    info = folder / f"{DISTRIBUTION}-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: mlx-provider-scripted\nVersion: {__version__}\n"
    (info / "METADATA").write_text(head)
    module = __package__ + ".family"
    (info / "entry_points.txt").write_text(f"[mlx_provider]\nscripted = {module}\n")
    before = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.fspath(folder), before]))}
