"""What authors of plugins import of the core is public, ours as well as the examples'."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_provider import families

ROOT = Path(__file__).parents[2]
CORE = ROOT / "mlx_provider"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
(CONTRACT,) = (
    contract
    for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
    if contract["name"] == "plugins use public names alone"
)
EXEMPT = {tuple(line.split(" -> ")) for line in CONTRACT["ignore_imports"]}

PUBLIC = {"cores", "errors", "families", "records"}
"""Of the core's modules and packages, what plugins may import beside its root."""
TOOLKIT = set(re.findall(r"^\| `([\w.]+)` \|", families.__doc__ or "", re.MULTILINE))
IMPORTABLE = {
    "mlx_provider",
    "mlx_provider.cores",
    "mlx_provider.errors",
    "mlx_provider.records",
    *(f"mlx_provider.families.{name}" for name in TOOLKIT),
}

LOOKS_INSIDE = {source.removesuffix(".**") for source, _ in EXEMPT if source.endswith(".**")}
"""Plugins whose modules may import anything, all but the one with the hooks."""

EXAMPLES = [path.parent for path in (ROOT / "examples").glob("*/pyproject.toml")]
AUTHORED = sorted(
    path
    for folder in (ROOT / "plugins", *EXAMPLES)
    for path in folder.rglob("*.py")
    if not {*LOOKS_INSIDE, "tests"} & set(path.relative_to(folder).parts)
    or (path.parent.parent == folder and path.stem == "__init__")
)


@pytest.mark.parametrize("path", AUTHORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_author_imports_public_names_alone(path: Path) -> None:
    own = ".".join(path.relative_to(path.parents[1]).with_suffix("").parts)
    found = [
        (module, name)
        for module, name in imported(path)
        if module.partition(".")[0] == "mlx_provider"
        and (own.removesuffix(".__init__"), module) not in EXEMPT
        and (own.removesuffix(".__init__"), f"{module}.{name}") not in EXEMPT
    ]
    assert {module for module, _ in found} <= IMPORTABLE
    assert [name for _, name in found if name.startswith("_")] == []


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Each module that a file imports, with a name that it takes from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_linter_forbids_whatever_is_not_public() -> None:
    modules = {path.stem for path in CORE.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in CORE.glob("*/__init__.py")}
    private = (modules | packages) - PUBLIC
    assert set(CONTRACT["forbidden_modules"]) == {f"mlx_provider.{name}" for name in private}


def test_the_toolkits_table_names_each_of_its_modules() -> None:
    folder = CORE / "families"
    parts = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    modules = {
        ".".join(part) for part in parts if "__init__" not in part and "tokenizer" not in part
    }
    assert modules | {"tokenizer"} == TOOLKIT
