"""`mlx-provider doctor` sends one token through a real proxy to the engine of this user."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.doctor import Subject, examine, model
from mlx_provider.gateway.engine import warm_up
from mlx_provider.gateway.proxy import Proxy


@dataclass(frozen=True)
class Shared(Proxy):
    """The proxy of this folder, which goes on."""

    def stop(self) -> None:
        """Nothing."""


def test_doctor_reports_one_token_and_the_state_of_the_engine(
    proxy: Proxy, own_engine: HttpClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(proxy.process, proxy.url, proxy.key, proxy.log)
    monkeypatch.setattr(model, "start_proxy", lambda config, environ: shared)
    monkeypatch.setattr(model, "PROXY_MODEL", "demo")
    subject = Subject("demo", home=tmp_path)
    warm_up(own_engine, "demo")
    before = own_engine.health().pid
    found = {each.name: each for each in examine(subject)}
    assert found["proxy.token"].state == "ok", found["proxy.token"]
    assert f"process {before}" in found["engine.running"].what
    assert own_engine.health().pid == before, "an engine that was there stays"
    monkeypatch.setattr(model, "PROXY_MODEL", "nobody")
    found = {each.name: each for each in examine(Subject("demo", home=tmp_path))}
    assert found["proxy.token"].state == "fail"
    assert "400" in found["proxy.token"].what
