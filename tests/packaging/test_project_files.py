"""What stands in several files of the project agrees."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import mlx_provider

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("httpx", "litellm", "mlx", "mlx-lm", "mlx-vlm", "pluggy", "pydantic", "transformers")
TOP = ("pyproject.toml", "mlx_provider", "plugins", "tests", "examples", "tox.ini")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [line for line in script.splitlines()[1:] if line and not line.startswith("#")]
    assert commands[:2] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
    (command,) = commands[2:]
    assert f"```sh\n{command}\n```" in README
    assert command.endswith("/tox")


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_required_top_level_files_exist() -> None:
    assert [name for name in TOP if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_required_package_is_a_dependency_and_imported(package: str) -> None:
    needed = {re.split(r"[^\w-]", each)[0] for each in PYPROJECT["project"]["dependencies"]}
    assert package in needed
    uses = re.compile(rf"^\s*(import|from) {package.replace('-', '_')}\b", re.MULTILINE)
    paths = (path for name in ("mlx_provider", "plugins") for path in (ROOT / name).rglob("*.py"))
    assert any(uses.search(path.read_text(encoding="utf-8")) for path in paths)


def test_every_plugin_folder_is_declared_everywhere() -> None:
    folders = {path.parent.name for path in (ROOT / "plugins").glob("mlx_provider_*/__init__.py")}
    entry_points = PYPROJECT["project"]["entry-points"]["mlx_provider"]
    assert {name: f"mlx_provider_{name}" for name in entry_points} == entry_points
    assert set(entry_points.values()) == folders
    linted = PYPROJECT["tool"]["importlinter"]["root_packages"]
    assert set(linted) == {"mlx_provider", *folders}


def test_the_layers_drawn_in_the_guide_equal_the_import_contract() -> None:
    (layers,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["name"] == "layers")
    names = re.compile(r"\w+")
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(r"```\n(testing\n.*?)```", guide, re.DOTALL)
    assert names.findall(drawn) == names.findall("\n".join(layers["layers"]))


def test_the_installed_version_is_that_of_the_source() -> None:
    assert version("mlx-provider") == mlx_provider.__version__


def test_the_compatibility_page_explains_each_extra() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| extra \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == list(PYPROJECT["project"]["optional-dependencies"])


def test_the_readme_has_at_most_200_lines_and_no_broken_local_links() -> None:
    assert len(README.splitlines()) <= 200
    local = re.findall(r"\]\(([^):#]+)\)", README)
    assert local
    assert [path for path in local if not (ROOT / path).exists()] == []
