"""Each example as if it were installed, where it is not: importable, and known by its metadata."""

import importlib
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def project_of(folder: Path) -> dict[str, Any]:
    """`[project]` of its pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def installed(name: str) -> bool:
    """Whether pip has put it there."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


MISSING = [
    folder.parent
    for folder in sorted(HERE.glob("*/pyproject.toml"))
    if not installed(project_of(folder.parent)["name"])
]
sys.path.extend(map(str, MISSING))


def write_metadata(folder: Path, site: Path) -> None:
    """What pip would leave of a development install."""
    project = project_of(folder)
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    points = project["entry-points"]["mlx_provider"].items()
    lines = "\n".join(f"{entry} = {module}" for entry, module in points)
    (info / "entry_points.txt").write_text(f"[mlx_provider]\n{lines}\n", encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def examples_installed() -> Iterator[None]:
    """While tests of the examples run, and no longer: others list what is installed. No test sees
    the user's settings or engine."""
    with tempfile.TemporaryDirectory(prefix="mlxp-") as site, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLX_PROVIDER_")]:
            patch.delenv(name)
        patch.setenv("MLX_PROVIDER_RUNTIME_DIR", f"{site}/run")
        for folder in MISSING:
            write_metadata(folder, Path(site))
        patch.syspath_prepend(site)
        for folder in (*MISSING, site):  # for processes that a test starts
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        importlib.invalidate_caches()
        yield
