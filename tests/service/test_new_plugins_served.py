"""An engine serves with plugins that `mlx-provider new-plugin` has written."""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.scaffold import KINDS, plugin_name, write_plugin

ROLL = {"type": "object", "properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": ROLL}}]
IN_USE = ("family", "tool-parser", "reasoning-parser", "drafter")
"""Kernels would change functions for the tests that follow."""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """New plugins by kind, installed as pip would install them."""
    made: dict[str, Path] = {}
    registry = PluginRegistry.discover({})
    for option in IN_USE:
        name = plugin_name(f"served-{option}", KINDS[option], registry)
        write_plugin(name, KINDS[option], tmp_path)
        made[option] = tmp_path / name.distribution
        info = made[option] / f"{name.module}-0.1.0.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name.distribution}\nVersion: 0.1.0\n"
        (info / "METADATA").write_text(head)
        (info / "entry_points.txt").write_text(f"[mlx_provider]\n{name.name} = {name.module}\n")
        monkeypatch.syspath_prepend(made[option])
    importlib.invalidate_caches()
    yield made
    for module in [each for each in sys.modules if each.startswith("mlx_provider_served_")]:
        del sys.modules[module]


@pytest.mark.usefixtures("eager_drafts")
def test_a_reply_uses_each_new_plugin(
    folders: dict[str, Path], own_model: Any, build_tiny: Any, tmp_path: Path
) -> None:
    own = runpy.run_path(str(folders["family"] / "try_it.py"))["checkpoint"](tmp_path / "own")
    model = own_model(own)
    assert model.ask().only.content

    guessing = ModelOptions(drafter="served_drafter")
    foreseeable = model.beside(build_tiny("llama", foreseeable=True))
    repeated = foreseeable.ask(max_tokens=80, options=guessing)
    assert repeated.usage.drafted_tokens > 0

    formats = ModelOptions(
        tool_parser="served_tool_parser", reasoning_parser="served_reasoning_parser"
    )
    caller = model.beside(build_tiny("qwen3"))
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    called = caller.ask(**asked, max_tokens=300, options=formats)
    ((name, arguments),) = called.only.arguments
    assert (name, arguments["sides"] in (6, 20)) == ("roll", True)
    assert caller.served(formats).reasoning_parser.name == "served_reasoning_parser"
