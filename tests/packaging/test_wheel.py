"""What the wheel holds; under tox the package is installed from one."""

import json
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {".py", ".typed", ".html", ".json", ".yaml", ".jinja", ".safetensors", ".toml"}
LARGEST = 16e6
"""Bytes of all files."""


@pytest.fixture(scope="module")
def files() -> set[str]:
    dist = distribution("mlx-provider")
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("an editable install has no files of its own")
    return {path.as_posix() for path in dist.files or [] if path.suffix != ".pyc"}


def test_the_wheel_contains_every_source_file(files: set[str]) -> None:
    core = {path.relative_to(ROOT).as_posix() for path in sources("mlx_provider")}
    plugins = {path.relative_to(ROOT / "plugins").as_posix() for path in sources("plugins")}
    assert core | plugins <= files


@pytest.mark.parametrize("model", ["model", "hybrid"])
def test_the_wheel_contains_the_demo_models(files: set[str], model: str) -> None:
    folder = ROOT / "mlx_provider/demo" / model
    shipped = {path.relative_to(ROOT).as_posix() for path in folder.iterdir()}
    assert shipped
    assert shipped <= files


def test_the_wheel_contains_only_the_packages_and_the_command(files: set[str]) -> None:
    tops = {path.split("/")[0] for path in files if not path.startswith("../")}
    ours = {top for top in tops if not top.endswith((".dist-info", "__pycache__"))}
    assert ours == {"mlx_provider"} | {path.name for path in (ROOT / "plugins").iterdir()}
    assert {path for path in files if path.startswith("../")} == {"../../../bin/mlx-provider"}


def test_the_wheel_contains_only_known_file_types_and_no_tests(files: set[str]) -> None:
    inside = {path for path in files if not path.startswith(("../", "mlx_provider-"))}
    kinds = {Path(path).suffix or Path(path).name for path in inside}
    assert kinds <= KINDS, sorted(path for path in inside if Path(path).suffix not in KINDS)
    assert not any(re.search(r"(^|/)(\.|test_\w+\.py$)", path) for path in inside)


def test_the_wheel_is_small(files: set[str]) -> None:
    """Both demo models have 7.5 MB."""
    sizes = [path.size or 0 for path in distribution("mlx-provider").files or []]
    assert 2e6 < sum(sizes) < LARGEST


def test_the_wheel_contains_the_licence_and_the_readme(files: set[str]) -> None:
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in files)
    described = distribution("mlx-provider").read_text("METADATA") or ""
    assert "\nDescription-Content-Type: text/markdown\n" in described
    assert described.endswith((ROOT / "README.md").read_text(encoding="utf-8"))


def sources(folder: str) -> list[Path]:
    found = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("py.typed")]
    for kind in ("html", "jinja", "yaml"):
        found += (ROOT / folder).rglob(f"*.{kind}")
    assert found
    return found
