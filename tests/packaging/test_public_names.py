"""What authors of plugins import of the core is public, ours as well as the examples'."""

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

PUBLIC = {"commands", "cores", "errors", "families", "records"}
"""Of the core's modules and packages, what plugins may import beside its root."""
TOOLKIT = set(re.findall(r"^\| `([\w.]+)` \|", families.__doc__ or "", re.MULTILINE))
IMPORTABLE = {
    "mlx_provider",
    "mlx_provider.commands",
    "mlx_provider.cores",
    "mlx_provider.errors",
    "mlx_provider.records",
    *(f"mlx_provider.families.{name}" for name in TOOLKIT),
}

EXAMPLES = [path.parent for path in (ROOT / "examples").glob("*/pyproject.toml")]
AUTHORED = sorted(
    path
    for folder in (ROOT / "plugins", *EXAMPLES)
    for path in folder.rglob("*.py")
    if "tests" not in path.relative_to(folder).parts
)


@pytest.mark.parametrize("path", AUTHORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_plugins_and_examples_import_only_public_names(path: Path) -> None:
    found = [each for each in imported(path) if each[0].partition(".")[0] == "mlx_provider"]
    assert {module for module, _ in found} <= IMPORTABLE
    assert [name for _, name in found if name.startswith("_")] == []


def test_the_scripted_family_imports_only_public_names() -> None:
    """As a stranger's family does, of which it is an example."""
    for path in (CORE / "testing" / "scripted").glob("*.py"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found = [n for n in tree if isinstance(n, ast.ImportFrom) and n.level == 3]
        assert {f"mlx_provider.{n.module}" if n.module else "mlx_provider" for n in found} <= (
            IMPORTABLE
        )


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Each module that a file imports, with a name that it takes from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_core_imports_no_plugin() -> None:
    plugins = {path.name for path in (ROOT / "plugins").iterdir()}
    found = [
        (path, module)
        for path in CORE.rglob("*.py")
        for module, _ in imported(path)
        if module.partition(".")[0] in plugins
    ]
    assert plugins
    assert found == []


def test_the_linter_lets_plugins_import_what_is_public() -> None:
    allowed = {name.split(".")[1] for source, name in EXEMPT if source == "**"}
    assert allowed == PUBLIC
    assert len(EXEMPT) == len(PUBLIC), "for each plugin alike"


def test_the_toolkits_table_names_each_of_its_modules() -> None:
    folder = CORE / "families"
    parts = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    modules = {
        ".".join(part) for part in parts if "__init__" not in part and "tokenizer" not in part
    }
    assert modules | {"tokenizer"} == TOOLKIT
