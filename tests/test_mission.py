"""What `mission.toml` names exists: tests that an environment of tox runs, commands, and pages."""

import ast
import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click import Context
from typer.main import get_group

from mlx_provider.cli.app import build
from mlx_provider.registry import PluginRegistry

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MISSION = tomllib.loads((TESTS / "mission.toml").read_text(encoding="utf-8"))
COUNT = 173
"""Rows that the project was asked for. It changes only together with what is asked."""


def test_no_row_is_lost_or_without_proof() -> None:
    assert sum(map(len, MISSION.values())) == COUNT
    assert [row for rows in MISSION.values() for row in rows if not rows[row]] == []


@pytest.mark.parametrize("part", MISSION)
def test_the_proof_of_a_row_exists(part: str) -> None:
    for proof in dict.fromkeys(proof for proofs in MISSION[part].values() for proof in proofs):
        if proof.startswith("$ "):
            _check_command(shlex.split(proof[2:]))
        elif proof.startswith("docs/"):
            _check_page(*proof.partition("#")[::2])
        else:
            _check_test(*proof.split("::"))


def _check_test(file: str, function: str) -> None:
    assert Path(file).name.startswith("test_")
    assert function.startswith("test_")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name: node for node in _tree(TESTS / file).body if isinstance(node, functions)}
    assert function in found, f"{file} has no function {function}"
    markers = _markers_of(file, found[function])
    path = f"tests/{file}"
    assert any(_selects(*run, path, markers) for run in _runs()), f"no environment runs {path}"


def _check_command(words: list[str]) -> None:
    if words[:2] == ["tox", "-e"]:
        assert words[2] in {name.split("{")[0] for name in _environments()}
        return
    program, *names = words
    assert program == "mlx-provider"
    command = _commands()
    for name in (word for word in names if word.islower()):
        command = command.get_command(Context(command), name)
        assert command is not None, f"no command {name}"


@cache
def _commands() -> Any:
    return get_group(build(PluginRegistry.discover({})))


def _check_page(page: str, anchor: str) -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    slugs = {re.sub(r"[^\w\s-]", "", each).strip().lower().replace(" ", "-") for each in headings}
    assert not anchor or anchor in slugs


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _markers_of(file: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Markers of a test by its decorators, its module, and the `conftest.py` of its folder."""
    module, conftest = TESTS / file, (TESTS / file).parent / "conftest.py"
    found = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found += [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    for node in ast.walk(_tree(conftest)) if conftest.exists() else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_marker"):
            found += [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    names = map(ast.unparse, found)
    return {name.removeprefix("pytest.mark.") for name in names if name.startswith("pytest.mark.")}


@cache
def _environments() -> dict[str, str]:
    """The commands of each environment of tox."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    sections = {name: tox[name].get("commands", "") for name in tox if name.startswith("testenv")}
    return {name.removeprefix("testenv").lstrip(":"): each for name, each in sections.items()}


@cache
def _runs() -> list[tuple[str, tuple[str, ...]]]:
    """The expression of markers and the paths of each `pytest` that tox runs."""
    return list(_pytests())


def _pytests() -> Iterator[tuple[str, tuple[str, ...]]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = project["tool"]["pytest"]["ini_options"]
    for commands in _environments().values():
        for line in commands.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:1] != ["pytest"]:
                continue
            words = [*shlex.split(options["addopts"]), *words]
            last = len(words) - 1 - words[::-1].index("-m")
            paths = tuple(word for word in words if word.startswith(("tests", "examples")))
            yield words[last + 1], paths or ("tests",)


def _selects(expression: str, paths: tuple[str, ...], path: str, markers: set[str]) -> bool:
    names = re.findall(r"\w+", expression)
    selected = eval(expression, {"__builtins__": {}}, {name: name in markers for name in names})
    return bool(selected) and any(path == each or path.startswith(f"{each}/") for each in paths)
