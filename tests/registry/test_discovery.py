"""Which plugins are loaded, in what order, and what happens to broken ones."""

from collections.abc import Callable

import pytest

from mlx_provider import hookspecs
from mlx_provider.registry import PluginRegistry
from named_plugins import discover
from python_process import run_python

Install = Callable[..., str]

FAMILY = """
from mlx_provider import ModelFamily, hookimpl

@hookimpl
def mlx_model_families():
    yield ModelFamily({name!r}, lambda config: {priority} * (config["model_type"] == {name!r}), str)
"""

PARSER = "from mlx_provider import CallGrammar, TaggedArguments, ToolParser, hookimpl\n@hookimpl\n"
BROKEN = {
    "import": ("import nowhere_to_be_found", "ModuleNotFoundError: No module named"),
    "syntax": ("def", "SyntaxError:"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "unknown argument": (
        "from mlx_provider import hookimpl\n@hookimpl\ndef mlx_model_families(x): yield",
        "PluginValidationError:",
    ),
    "unknown hook": (
        "from mlx_provider import hookimpl\n@hookimpl\ndef mlx_no_such_hook(): ...",
        "PluginValidationError: unknown hook 'mlx_no_such_hook'",
    ),
    "raises": (
        "from mlx_provider import hookimpl\n@hookimpl\ndef mlx_model_families(): 1 / 0; yield",
        "ZeroDivisionError: division by zero",
    ),
    "wrong record": (
        "from mlx_provider import hookimpl\n@hookimpl\ndef mlx_tool_parsers(): yield 'hermes'",
        "PluginError: mlx_tool_parsers yielded str, not ToolParser",
    ),
    "not iterable": (
        "from mlx_provider import hookimpl\n@hookimpl\ndef mlx_tool_parsers(): return 7",
        "PluginError: mlx_tool_parsers returned 7, not an iterable of ToolParser",
    ),
    "no callable": (
        "from mlx_provider import ToolParser, hookimpl\n@hookimpl\n"
        "def mlx_tool_parsers(): yield ToolParser('x', '<', '>', parse=None)",
        "PluginError: ToolParser 'x': parse is not callable",
    ),
    "aliases": (
        "from mlx_provider import ReasoningParser, hookimpl\n@hookimpl\n"
        "def mlx_reasoning_parsers(): yield ReasoningParser('x', '<', '>', aliases=None)",
        "PluginError: ReasoningParser 'x': aliases is not a tuple",
    ),
    "no text in a grammar": (
        f"{PARSER}def mlx_tool_parsers(): yield ToolParser("
        "'x', '<', '>', grammar=CallGrammar('{name}', 3))",
        "PluginError: ToolParser 'x': grammar.after is not text",
    ),
    "no grammar": (
        f"{PARSER}def mlx_tool_parsers(): yield ToolParser('x', '<', '>', grammar='<')",
        "PluginError: ToolParser 'x': grammar is not a CallGrammar",
    ),
    "no place for the name": (
        f"{PARSER}def mlx_tool_parsers(): yield ToolParser("
        "'x', '<', '>', grammar=CallGrammar('<', '>'))",
        "PluginError: ToolParser 'x': grammar.before does not hold {name}, the place of",
    ),
    "one text of two": (
        f"{PARSER}def mlx_tool_parsers(): yield ToolParser('x', '<', '>', grammar=CallGrammar("
        "'{name}', '>', tagged=TaggedArguments('<', '>', '>', quotes=('<',))))",
        "PluginError: ToolParser 'x': grammar.tagged.quotes is not two texts or None",
    ),
    "no name": (
        "from mlx_provider import ReasoningParser, hookimpl\n@hookimpl\n"
        "def mlx_reasoning_parsers(): yield ReasoningParser('', '<', '>')",
        "PluginError: mlx_reasoning_parsers yielded a ReasoningParser without a name",
    ),
    "twice": (
        "from mlx_provider import ReasoningParser, hookimpl\n@hookimpl\n"
        "def mlx_reasoning_parsers(): return [ReasoningParser(x, '<', '>') for x in ('ab', 'a-b')]",
        "PluginError: mlx_reasoning_parsers yields 'a-b' twice",
    ),
    "forgotten decorator": (
        "def mlx_model_families(): return []",
        "PluginError: mlx_provider_broken implements no hook; is @hookimpl missing?",
    ),
    "patches": (
        "from mlx_provider import ModelFamily, hookimpl\n@hookimpl\n"
        "def mlx_model_families(): yield ModelFamily('x', len, len, patches=['mlx_lm.x'])",
        "PluginError: ModelFamily 'x': patches is not a tuple of UpstreamPatch",
    ),
    "newer API": (
        "from mlx_provider import hookimpl\nmlx_provider_api = 2\n"
        "@hookimpl\ndef mlx_model_families(): return []",
        "PluginError: written for plugin API 2, this mlx-provider has 1:",
    ),
}


@pytest.mark.parametrize(("source", "error"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_listed_and_others_still_load(
    install_plugin: Install, source: str, error: str
) -> None:
    broken = install_plugin("mlx-provider-broken", source)
    toy = install_plugin("mlx-provider-toy", FAMILY.format(name="toy", priority=10))
    registry = discover(broken, toy)
    first, second = registry.plugins
    assert first.error.startswith(error)
    assert (first.name, first.hooks, dict(first.records)) == (broken, (), {})
    assert second.error is None
    assert registry.family_for({"model_type": "toy"})[0].name == "toy"


def test_a_plugin_with_one_failed_hook_is_not_used_at_all(install_plugin: Install) -> None:
    source = FAMILY.format(name="half", priority=10) + (
        "@hookimpl\ndef mlx_tool_parsers():\n    raise OSError('no such format')\n"
    )
    registry = discover(install_plugin("mlx-provider-half", source))
    error = "OSError: no such format (mlx_provider_half.py, line 9, in mlx_tool_parsers)"
    assert registry.plugins[0].error == error
    assert registry.model_families == {}


def test_ctrl_c_during_discovery_is_not_caught(install_plugin: Install) -> None:
    name = install_plugin("mlx-provider-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover(name)


def test_a_loaded_plugin_has_its_distribution_and_version(install_plugin: Install) -> None:
    source = FAMILY.format(name="toy", priority=10)
    name = install_plugin("mlx-provider-toy", source, version="0.3")
    (plugin,) = discover(name).plugins
    assert (plugin.distribution, plugin.version) == ("mlx-provider-toy", "0.3")
    assert plugin.hooks == ("mlx_model_families",)
    assert plugin.records["model family"] == ("toy",)
    assert (plugin.error, plugin.notes, plugin.built_in) == (None, (), False)


def test_a_plugin_that_states_the_current_api_version_loads(install_plugin: Install) -> None:
    source = "mlx_provider_api = 1\n" + FAMILY.format(name="toy", priority=10)
    assert discover(install_plugin("mlx-provider-toy", source)).plugins[0].error is None


@pytest.mark.parametrize(
    ("stated", "error"),
    [
        (
            "1",
            "written for plugin API 1, this mlx-provider has 4, and takes 3 or later: update the",
        ),
        ("5", "written for plugin API 5, this mlx-provider has 4: update mlx-provider"),
        ("'4'", "mlx_provider_api is '4', not a whole number"),
    ],
)
def test_a_plugin_of_an_unsupported_api_version_is_refused(
    install_plugin: Install, monkeypatch: pytest.MonkeyPatch, stated: str, error: str
) -> None:
    monkeypatch.setattr(hookspecs, "OLDEST_API", 3)
    monkeypatch.setattr(hookspecs, "API_VERSION", 4)
    source = f"mlx_provider_api = {stated}\n" + FAMILY.format(name="toy", priority=10)
    (plugin,) = discover(install_plugin("mlx-provider-toy", source)).plugins
    assert (plugin.error or "").startswith(f"PluginError: {error}")


def test_a_plugin_of_an_older_supported_api_version_loads_with_a_note(
    install_plugin: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hookspecs, "API_VERSION", 2)
    source = "mlx_provider_api = 1\n" + FAMILY.format(name="toy", priority=10)
    (plugin,) = discover(install_plugin("mlx-provider-toy", source)).plugins
    assert plugin.error is None
    assert plugin.notes == ("written for plugin API 1, this mlx-provider has 2: update the plugin",)


def test_built_in_plugins_load_first(install_plugin: Install) -> None:
    stranger = install_plugin("aaa", FAMILY.format(name="a", priority=10))
    ours = install_plugin("mlx-provider", FAMILY.format(name="z", priority=10), name="zzz")
    assert [plugin.name for plugin in discover(stranger, ours).plugins] == [ours, stranger]


def test_an_unset_plugins_variable_loads_all_and_an_empty_one_none(install_plugin: Install) -> None:
    name = install_plugin("mlx-provider-toy", FAMILY.format(name="toy", priority=10))
    assert name in [plugin.name for plugin in PluginRegistry.discover({}).plugins]
    assert PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}).plugins == []


def test_a_plugins_variable_loads_the_listed_ones_and_reports_missing_ones(
    install_plugin: Install, caplog: pytest.LogCaptureFixture
) -> None:
    toy = install_plugin("mlx-provider-toy", FAMILY.format(name="toy", priority=10))
    install_plugin("mlx-provider-other", "raise AssertionError('must not be imported')")
    registry = PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": f" {toy} , typo,"})
    assert [(plugin.name, plugin.error) for plugin in registry.plugins] == [
        (toy, None),
        ("typo", "MLX_PROVIDER_PLUGINS names it, but no such plugin is installed"),
    ]
    assert "typo" in caplog.text


def test_discovery_reads_the_plugins_variable_by_default(
    install_plugin: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = install_plugin("mlx-provider-toy", FAMILY.format(name="toy", priority=10))
    monkeypatch.setenv("MLX_PROVIDER_PLUGINS", name)
    assert [plugin.name for plugin in PluginRegistry.discover().plugins] == [name]


def test_discovery_imports_no_heavy_package() -> None:
    """Every plugin of ours, by its module: also where the distribution is not installed."""
    code = """
import importlib.util, pkgutil, sys
from mlx_provider.registry import PluginRegistry
from mlx_provider.registry.contents import load
from importlib.metadata import EntryPoint

PluginRegistry.discover()
for found in pkgutil.iter_modules():
    if found.name.startswith("mlx_provider_"):
        load(EntryPoint(found.name, found.name, "mlx_provider"))
heavy = {"litellm", "mlx", "mlx_lm", "mlx_vlm", "transformers", "huggingface_hub", "typer"}
print(sorted(heavy & sys.modules.keys()))
"""
    assert run_python(code).stdout.strip() == "[]"
