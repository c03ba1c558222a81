"""Each example of a plugin is built as a wheel, and works from it."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from python_process import run_python

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every wheel, laid out as pip does it: none has anything to compile, or scripts."""
    pytest.importorskip("hatchling", reason="builds wheels; it is in the group `test`")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    for example in EXAMPLES:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=example, check=True, capture_output=True, timeout=300)
    for wheel in wheels.glob("*.whl"):
        assert wheel.name.endswith("-none-any.whl")
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


LISTING = """
import json, sys
from mlx_provider.registry import PluginRegistry
found = PluginRegistry.discover({}).plugins
print(json.dumps({plugin.name: [plugin.distribution, plugin.error] for plugin in found}))
print(json.dumps({name: getattr(module, "__file__", "") for name, module in sys.modules.items()}))
"""


@pytest.fixture(scope="module")
def listed(site: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Where they are installed: distribution and error by plugin, and the file of each module."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = run_python(LISTING, env=os.environ | {"PYTHONPATH": path})
    plugins, modules = map(json.loads, ran.stdout.splitlines())
    return plugins, modules


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_plugin_is_discovered_from_its_wheel_without_error(
    example: Path, site: Path, listed: tuple[dict[str, list[str]], dict[str, str]]
) -> None:
    plugins, modules = listed
    project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, module in project["entry-points"]["mlx_provider"].items():
        assert plugins[name] == [project["name"], None]
        assert Path(modules[module]).is_relative_to(site)
