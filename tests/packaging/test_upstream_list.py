"""`docs/upstream.md` lists every patch of upstream, and each is needed still."""

import ast
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sysconfig.get_path("purelib"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CODED = re.compile(r"`([^`]+)`")
WHILE = re.compile(r"`([\w/.]+\.(?:py|so))`: `([^`]+)`")
PUTTING = frozenset({"patch", "replace_attribute", "Replacement"})
"""Names by which our code and plugins put a function into upstream's modules."""
PERHAPS = re.compile(
    r"\b(?:patch|replace_attribute|Replacement|setattr)\(|^ +[\w.]+ = \w+$", re.MULTILINE
)
"""Spares most modules the parser."""
PRIVATE = "upstream._"
"""How a plugin reads a private name of upstream's."""
NO_PATCH = frozenset(
    {
        "mlx_provider/upstream/__init__.py",
        "mlx_provider/families/vision/loading.py",  # likewise, while weights load
        "mlx_provider/serving/loader.py",  # puts in what a plugin's row is for
    }
)


@dataclass(frozen=True)
class Row:
    where: str
    of: frozenset[str]
    needed: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def rows() -> list[Row]:
    page = (ROOT / "docs/upstream.md").read_text(encoding="utf-8")
    cells = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [
        Row(
            CODED.findall(where)[0],
            frozenset(CODED.findall(of)),
            tuple(WHILE.findall(needed)),
            tuple(CODED.findall(tests)),
        )
        for where, of, needed, _, tests in cells
    ]


ROWS = rows()


def test_the_upstream_page_has_a_row_for_every_patch() -> None:
    assert {row.where for row in ROWS} == set(sites()) - NO_PATCH


def test_every_upstream_row_names_existing_tests_and_bounded_packages() -> None:
    optional = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    stated = {bare(each) for each in [*PROJECT["dependencies"], *optional]}
    for row in ROWS:
        assert row.of, row.where
        assert row.of <= stated, row.where
        assert row.tests, row.where
        assert [name for name in row.tests if not (ROOT / name).is_file()] == [], row.where


@pytest.mark.upstream
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.where)
def test_each_patch_is_still_needed_by_the_installed_upstream(row: Row) -> None:
    for file, text in row.needed:
        path = INSTALLED / file
        if path.suffix == ".so" and not path.exists():
            continue  # of another system
        assert path.exists(), f"{file} is gone: {row.where} goes, or is read anew"
        assert text.encode() in path.read_bytes(), f"{file}: {row.where} goes, or is read anew"


def sites() -> Iterator[str]:
    for folder in ("mlx_provider", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            text = path.read_text("utf-8")
            if where.startswith("mlx_provider/upstream/") or PRIVATE in text or puts(text):
                yield where


def puts(source: str) -> bool:
    """Whether a module puts a function of its own into somebody else's module or class."""
    if not PERHAPS.search(source):
        return False
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {
        node.name
        for function in functions
        for node in function.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return any(_puts(node, inner) for node in ast.walk(tree))


def _puts(node: ast.AST, inner: set[str]) -> bool:
    if isinstance(node, ast.Assign):
        on = [each.value for each in node.targets if isinstance(each, ast.Attribute)]
        others = [each for each in on if isinstance(each, ast.Name) and each.id != "self"]
        return bool(others) and isinstance(node.value, ast.Name) and node.value.id in inner
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    last = node.args[-1] if node.args else None
    given = isinstance(last, ast.Name) and last.id in inner
    return node.func.id in PUTTING or (node.func.id == "setattr" and given)


def bare(requirement: str) -> str:
    """Without extras, marker and spaces."""
    return re.sub(r"\[\w+\]|;.*| ", "", requirement)
