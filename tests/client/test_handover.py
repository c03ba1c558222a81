"""An engine that is out of date is replaced when that disturbs nobody; else it says so."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from mlx_provider.client import http
from mlx_provider.client import runtime_folder as identity_module
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.client.runtime_folder import differences, identity
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.requests import GenerateRequest


def finished(client: HttpClient) -> int:
    """Serve one request; the engine's process, one that has not ended with it."""
    while True:
        generation = client.submit(GenerateRequest(model="fake", prompt="count 1 0"))
        while generation.get(300):
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


def test_the_identity_of_an_engine_has_its_settings_but_no_secrets() -> None:
    given = {"MLX_PROVIDER_MAX_ROWS": "3", "MLX_PROVIDER_API_KEY": "secret", "HOME": "x"}
    before = identity({**given, "HF_TOKEN": "secret", "A_SLIDING_WINDOW": "9"})
    assert "secret" not in before.values()
    assert "HOME" not in before
    assert (before["MLX_PROVIDER_MAX_ROWS"], before["A_SLIDING_WINDOW"]) == ("3", "9")
    # Empty counts as unset, but for the plugins, where it means none.
    assert identity({"MLX_PROVIDER_MAX_QUEUE": ""}) == identity({})
    assert identity({"MLX_PROVIDER_PLUGINS": ""}) != identity({})
    after = {**identity({**given, "HF_TOKEN": "other"}), "python": "/other (3.11)"}
    assert set(differences(before, after)) == {"HF_TOKEN", "A_SLIDING_WINDOW", "python"}
    told = "; ".join(differences(before, after).values())
    assert "secret" not in told.replace("a secret with", "")
    assert differences({}, before) == {}


def test_a_process_of_an_older_version_does_not_replace_the_engine(
    with_identity: Any, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version is installed by now: no engine of this one can be started any more."""
    new = HttpClient(
        Address("http://engine", str(local.folder / "engine.sock")),
        start=local.engine(FAKE_VERSION="9").ensure,
    )
    local.stack.callback(new.close)
    monkeypatch.setattr(http, "__version__", "9")
    pid = finished(new)
    monkeypatch.setattr(http, "__version__", "8")
    monkeypatch.setattr(identity_module, "installed_version", lambda name: "9")
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="restart this process"):
            finished(with_identity({}))
    assert new.health().pid == pid
    monkeypatch.setattr(http, "__version__", "9")
    assert finished(new) == pid
