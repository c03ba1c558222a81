"""An engine that is out of date is replaced when that disturbs nobody; else it says so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.client.address import Address
from mlx_provider.client.http import HttpClient
from mlx_provider.client.identity import differences, identity
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.messages import GenerateRequest
from mlx_provider.registry import PluginRegistry


def finished(client: HttpClient) -> int:
    """Serve one request; the engine's process, one that has not ended with it."""
    while True:
        generation = client.submit(GenerateRequest(model="fake", prompt="count 1 0"))
        while generation.get(30):
            pass
        with suppress(EngineUnavailable):
            return client.health().pid


@pytest.fixture
def with_identity(local: Any) -> Iterator[Any]:
    """Clients of one runtime folder, each of which takes itself for what it is told."""

    def make(changed: Mapping[str, str], **environment: str) -> HttpClient:
        here = local.runtime(**environment)

        def mine() -> dict[str, str]:
            return {**identity(here.environment), **changed}

        address = Address("http://engine", str(here.socket))
        client = HttpClient(address, start=local.engine(**environment).ensure, identity=mine)
        local.stack.callback(client.close)
        return client

    return make


def test_an_idle_engine_gives_way_to_new_plugins(with_identity: Any) -> None:
    old = with_identity({})
    first = finished(old)
    assert finished(old) == first  # nothing has changed
    new = with_identity({"plugin angle": "mlx-provider-angle 2.0 0"})
    running = new.submit(GenerateRequest(model="fake", prompt="count 5 0.1"))
    second = new.health().pid
    assert second != first  # the very request that found it out of date
    while running.get(30):
        pass
    assert finished(old) == second  # who was attached goes on with the new one


def test_a_busy_engine_says_so_and_ends_when_it_is_idle(
    with_identity: Any, caplog: pytest.LogCaptureFixture, wait_until: Any
) -> None:
    old = with_identity({})
    running = old.submit(GenerateRequest(model="fake", prompt="count 30 0.05"))
    first = old.health().pid
    with caplog.at_level(logging.WARNING):
        assert finished(with_identity({"plugin angle": "2.0"})) == first
    assert "plugin angle: none, now 2.0" in caplog.text
    assert "engine restart" in caplog.text
    while events := running.get(30):
        last = events[-1]
    assert last.type == "done"
    wait_until(lambda: finished(old) != first)


def test_settings_of_one_client_do_not_take_the_engine_from_another(
    with_identity: Any, wait_until: Any
) -> None:
    one = with_identity({})
    first = finished(one)
    other = with_identity({"MLX_PROVIDER_MAX_ROWS": "3"})
    assert finished(other) == first
    one.close()
    other.close()
    last = with_identity({"MLX_PROVIDER_MAX_ROWS": "3"})
    wait_until(lambda: finished(last) != first)


def test_what_an_engine_is(monkeypatch: pytest.MonkeyPatch, install_plugin: Any) -> None:
    before = identity({"MLX_PROVIDER_MAX_ROWS": "3", "MLX_PROVIDER_API_KEY": "secret", "HOME": "x"})
    assert "secret" not in before.values()
    assert "HOME" not in before
    assert before["MLX_PROVIDER_MAX_ROWS"] == "3"
    # Empty counts as unset, but for the plugins, where it means none.
    assert identity({"MLX_PROVIDER_MAX_QUEUE": ""}) == identity({})
    assert identity({"MLX_PROVIDER_PLUGINS": ""}) != identity({})
    install_plugin("mlx-provider-late", "")
    (changed,) = differences(before, identity({"MLX_PROVIDER_MAX_ROWS": "3"}))
    assert changed.startswith("plugin mlx_provider_late: none, now mlx-provider-late 1.0")
    assert differences({}, before) == []


def command(*arguments: str) -> str:
    cli = build(PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}))
    result = CliRunner().invoke(cli, ["engine", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_engine_command(
    local: Any, with_identity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_provider.client import connection

    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(local.folder))
    monkeypatch.setattr(connection, "_connections", connection.Connections())
    for part in ("status", "stop"):
        with pytest.raises(EngineUnavailable):
            command(part)
    with pytest.raises(EngineUnavailable, match="no log"):
        command("logs")
    client = with_identity({})
    pid = finished(client)
    assert f"process {pid}" in command("status")
    assert json.loads(command("status", "--json"))["pid"] == pid
    assert f"process {pid}" in command("logs", "-n", "3")
    restarted = command("restart")
    assert f"process {client.health().pid} runs" in restarted
    assert str(pid) not in restarted
    pid = client.health().pid
    assert f"process {pid} has ended" in command("stop")
    assert finished(client) != pid
