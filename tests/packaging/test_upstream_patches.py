"""What our plugins replace of upstream is what they say that they replace."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_provider_cpu
from mlx_provider.registry import PluginRegistry
from mlx_provider_cpu.functions import REPLACEMENTS
from mlx_provider_cuda.forms import REPLACEMENTS as CUDA

PLUGINS = Path(__file__).parents[2] / "plugins"
REPLACING = re.compile(r"(?<!def )(?<!\w)(?:patch|replace_attribute)\(")
"""Calls of the toolkit by which a family puts its own function into upstream's modules."""
BROUGHT = {
    plugin.name: plugin.patches for plugin in PluginRegistry.discover({}).plugins if plugin.built_in
}
SAID = [patch for patches in BROUGHT.values() for patch in patches]


def test_the_cpu_plugin_lists_every_function_that_it_replaces() -> None:
    replaced = sorted(f"{each.module}.{each.name}" for each in REPLACEMENTS)
    assert sorted(patch.target for patch in mlx_provider_cpu.PATCHES) == replaced


def test_each_plugin_lists_every_upstream_function_that_it_replaces() -> None:
    made = {
        folder.name.removeprefix("mlx_provider_"): calls
        for folder in PLUGINS.iterdir()
        if (calls := sum(len(REPLACING.findall(p.read_text())) for p in folder.rglob("*.py")))
    }
    said = {name: len(patches) for name, patches in BROUGHT.items() if patches}
    replaced = {"cpu": len(REPLACEMENTS), "cuda": len(CUDA)}
    assert said == made | replaced


def module(folder: str, path: list[str]) -> tuple[str, list[str]] | None:
    """The source of the module that a dotted path names below a folder, and the names in it."""
    below, rest = Path(folder), list(path)
    while rest and (below / rest[0]).is_dir():
        below /= rest.pop(0)
    file = below / f"{rest[0]}.py"
    return (file.read_text(encoding="utf-8"), rest[1:]) if file.is_file() else None


@pytest.mark.parametrize("patch", SAID, ids=lambda patch: patch.target)
def test_every_replaced_upstream_function_exists(patch: object) -> None:
    package, *path = patch.target.split(".")
    spec = find_spec(package)
    assert spec is not None
    # a package without __init__ has every folder of its name on the path
    sources = [
        found for each in spec.submodule_search_locations or () if (found := module(each, path))
    ]
    assert sources
    source, names = sources[0]
    for name in names:
        assert re.search(rf"(def|class) {name}\b", source)
