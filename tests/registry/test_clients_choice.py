"""Which clients there are, and what becomes of those that are wrong."""

from collections.abc import Callable

import pytest

from mlx_provider.errors import BadRequest
from named_plugins import discover

Install = Callable[..., str]

CLIENT = """
from mlx_provider import Client, Profile, hookimpl

@hookimpl
def mlx_clients():
    yield Client({arguments})
"""


def install(install_plugin: Install, distribution: str, arguments: str, name: str = "") -> str:
    return install_plugin(distribution, CLIENT.format(arguments=arguments), name=name)


def test_a_third_party_client_replaces_a_built_in_one(install_plugin: Install) -> None:
    given = '"agent", "ours", "get ours", Profile, aliases=("the-agent",)'
    ours = install(install_plugin, "mlx-provider", given, "ours")
    theirs = install(install_plugin, "theirs", '"agent", "theirs", "get theirs", Profile')
    assert discover(ours).client("The Agent").command == "ours"
    registry = discover(ours, theirs)
    assert registry.client("agent").command == "theirs"
    assert registry.plugins[0].records["client"] == ("agent",)
    assert "is replaced by" in registry.plugins[0].notes[0]
    with pytest.raises(BadRequest, match="no client 'agnt' is installed; did you mean 'agent'"):
        registry.client("agnt")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param('"agent", "it", "get it", None', "profile is not callable", id="profile"),
        pytest.param('"agent", None, "get it", Profile', "command is not text", id="command"),
    ],
)
def test_an_invalid_client_record_makes_its_plugin_fail(
    install_plugin: Install, arguments: str, error: str
) -> None:
    (plugin,) = discover(install(install_plugin, "wrong", arguments)).plugins
    assert error in (plugin.error or "")
