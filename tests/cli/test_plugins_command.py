"""`mlx-provider plugins`."""

import json
from collections.abc import Callable

import pytest

from command_line import invoke
from mlx_provider.registry import PluginRegistry
from named_plugins import discover

Install = Callable[..., str]

TOY = """
from mlx_provider import ReasoningParser, hookimpl

@hookimpl
def mlx_reasoning_parsers():
    yield ReasoningParser("angle", "<think>", "</think>")

@hookimpl
def mlx_register_commands(cli):
    @cli.command()
    def plugins() -> None: ...
"""


@pytest.fixture
def registry(install_plugin: Install) -> PluginRegistry:
    names = [
        install_plugin("broken", "import nowhere_to_be_found", version="2.0"),
        install_plugin("toy", TOY),
        "typo",
    ]
    return discover(*names)


def run(registry: PluginRegistry, *arguments: str) -> str:
    result = invoke("plugins", *arguments, plugins=registry)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plugins_json_has_every_field_of_each_plugin(registry: PluginRegistry) -> None:
    broken, toy, typo = json.loads(run(registry, "--json"))
    assert broken == {
        "name": "broken",
        "distribution": "broken",
        "version": "2.0",
        "hooks": [],
        "records": {},
        "patches": [],
        "error": "ModuleNotFoundError: No module named 'nowhere_to_be_found' "
        "(broken.py, line 1, in <module>)",
        "notes": [],
    }
    assert toy["hooks"] == ["mlx_reasoning_parsers", "mlx_register_commands"]
    assert toy["records"]["reasoning parser"] == ["angle"]
    assert toy["error"] is None
    assert toy["notes"] == [
        "its commands are left out: PluginError: the command 'plugins' exists already"
    ]
    assert typo["error"].startswith("MLX_PROVIDER_PLUGINS names it")


def test_plugins_prints_the_same_facts_as_text(registry: PluginRegistry) -> None:
    assert run(registry).splitlines() == [
        "broken  broken 2.0",
        "  error             ModuleNotFoundError: No module named 'nowhere_to_be_found' "
        "(broken.py, line 1, in <module>)",
        "toy  toy 1.0",
        "  hooks             mlx_reasoning_parsers, mlx_register_commands",
        "  reasoning parser  angle",
        "  note              its commands are left out: "
        "PluginError: the command 'plugins' exists already",
        "typo",
        "  error             MLX_PROVIDER_PLUGINS names it, but no such plugin is installed",
    ]


def test_plugins_prints_that_there_are_no_plugins() -> None:
    registry = PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""})
    assert run(registry) == "no plugins\n"
    assert json.loads(run(registry, "--json")) == []


def test_plugins_prints_the_limits_of_a_family() -> None:
    shown = run(discover("vision"))
    assert "where images cannot be embedded one by one" in shown


def test_plugins_lists_each_upstream_patch_with_reason_and_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = discover("gemma3")
    (gemma,) = json.loads(run(registry, "--json"))
    (patch,) = gemma["patches"]
    assert patch["target"] == "mlx_vlm.models.gemma3.language.LanguageModel.sanitize"
    assert patch["version"] == "mlx-vlm 0.7.10"
    monkeypatch.setattr("mlx_provider.cli.inventory.installed_version", lambda name: "0.7.10")
    told = f"replaces          {patch['target']} of {patch['version']}: {patch['reason']}"
    assert told in run(registry)
    monkeypatch.setattr("mlx_provider.cli.inventory.installed_version", lambda name: "0.8.0")
    assert f"{patch['version']} (0.8.0 is installed): {patch['reason']}" in run(registry)
