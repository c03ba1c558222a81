"""A hook exists only with a docstring, a test, and a user among our plugins."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mlx_provider import hookspecs
from mlx_provider.registry.contents import load

ROOT = Path(__file__).parents[2]
HOOKS = [name for name, spec in vars(hookspecs).items() if hasattr(spec, "mlx_provider_spec")]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_docstring(hook: str) -> None:
    assert getattr(hookspecs, hook).__doc__


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used_by_a_built_in_plugin(hook: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["mlx_provider"].items()
    users = [name for name, module in points if hook in load(_point(name, module)).hooks]
    assert users


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_implemented_in_a_registry_test(hook: str) -> None:
    tests = (ROOT / "tests" / "registry").glob("test_*.py")
    assert any(f"def {hook}(" in path.read_text(encoding="utf-8") for path in tests)


def _point(name: str, module: str) -> EntryPoint:
    return EntryPoint(name, module, hookspecs.PROJECT)
