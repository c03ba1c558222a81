"""The record of a plugin's checks: kept, shown, and said to be stale where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.config import EngineSettings
from mlx_provider.registry import Plugin, PluginRegistry
from mlx_provider.registry.conformance import (
    CheckResult,
    ConformanceRecord,
    for_people,
    for_programs,
    record_of,
    record_path,
    software,
    source_digest,
)
from mlx_provider.serving.metrics import plugin_statuses
from mlx_provider.serving.service import ChatService

TOY = """
from mlx_provider import ReasoningParser, hookimpl

@hookimpl
def mlx_reasoning_parsers():
    yield ReasoningParser("angle", "<a>", "</a>")
"""


@pytest.fixture
def registry(
    install_plugin: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PluginRegistry:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": install_plugin("toy", TOY)})


@pytest.fixture
def plugin(registry: PluginRegistry) -> Plugin:
    return registry.plugins[0]


def made(plugin: Plugin) -> ConformanceRecord:
    return ConformanceRecord(
        plugin=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        software=software(),
        device="cpu",
        date="2026-11-23T07:00:00+00:00",
        source=source_digest(plugin),
        results=(
            CheckResult("plugin", "", "loads", "passed"),
            CheckResult("family f", "tiny, float32", "company", "failed", "tokens differ"),
            CheckResult("family f", "tiny, float32", "images", "skipped", "text only"),
        ),
    )


def test_it_is_read_as_it_was_written(plugin: Plugin) -> None:
    assert record_of(plugin) is None
    assert for_people(plugin) == ""
    assert for_programs(plugin) is None
    made(plugin).write()
    assert record_of(plugin) == made(plugin)


def test_what_failed_is_named(plugin: Plugin) -> None:
    made(plugin).write()
    mlx = software()["mlx"]
    assert for_people(plugin) == (
        f"1 of 3 checks FAILED, 1 skipped (2026-11-23, mlx {mlx} on cpu): "
        "family f [tiny, float32]: company"
    )
    good = replace(made(plugin), results=made(plugin).results[:1])
    assert good.summary == f"1 checks passed (2026-11-23, mlx {mlx} on cpu)"


def test_a_record_of_something_else_is_stale(plugin: Plugin, tmp_path: Path) -> None:
    old = {**software(), "mlx": "0.1"}
    for change, why in (
        ({"version": "0.9"}, "of version 0.9, not 1.0"),
        ({"software": old}, f"with mlx 0.1, not {software()['mlx']}"),
        ({"source": "another"}, "of other source files of that version"),
    ):
        replace(made(plugin), **change).write()  # type: ignore[arg-type]
        assert for_people(plugin).startswith(f"stale ({why}): 1 of 3")
    made(plugin).write()
    assert not for_people(plugin).startswith("stale")
    source = tmp_path / "fake-site-packages" / "toy.py"
    source.write_text(source.read_text() + "\n# edited\n")
    assert for_people(plugin).startswith("stale (of other source files of that version)")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', "\0" * 5_000_000])
def test_what_is_no_record_is_none(plugin: Plugin, content: str) -> None:
    path = record_path(plugin.distribution, plugin.name)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text(content)
    assert record_of(plugin) is None


def test_the_list_of_plugins_shows_it(registry: PluginRegistry, plugin: Plugin) -> None:
    made(plugin).write()

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(build(registry), ["plugins", *arguments], obj=registry)
        return result.stdout

    assert "  conformance       1 of 3 checks FAILED, 1 skipped" in run()
    (told,) = json.loads(run("--json"))
    assert told["conformance"]["failed"][0]["check"] == "company"
    assert (told["conformance"]["passed"], told["conformance"]["stale"]) == (1, "")


def test_health_shows_it(registry: PluginRegistry, plugin: Plugin) -> None:
    service = ChatService(EngineSettings(measurements="off"), registry=registry)
    try:
        assert [each.conformance for each in service.health().plugins] == [""]
        made(plugin).write()
        (told,) = service.health().plugins
        assert (told.name, told.version, told.in_use) == ("toy", "1.0", True)
        assert told.conformance.startswith("1 of 3 checks FAILED")
    finally:
        service.close()


def test_a_record_is_read_again_where_it_changed(registry: PluginRegistry, plugin: Plugin) -> None:
    made(plugin).write()
    assert plugin_statuses(registry)[0].conformance.startswith("1 of 3")
    replace(made(plugin), results=()).write()
    assert plugin_statuses(registry)[0].conformance.startswith("0 checks passed")
