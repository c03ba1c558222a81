"""A proxy's config and process, and an engine's end."""

import socket
import subprocess

import pytest

from mlx_provider.errors import EngineUnavailable, NotInstalled
from mlx_provider.gateway import proxy as proxy_module
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import Proxy, require_proxy, start_proxy

WORKER = """sh -c 'trap "" TERM; echo; exec sleep 100' & wait"""


def test_the_config_names_handler_and_model(tmp_path):
    config = proxy_config("demo", "org/name", api_base="http://x")
    entry = config["model_list"][0]
    assert entry["litellm_params"] == {"model": "mlx/org/name", "api_base": "http://x"}
    assert config["general_settings"]["cancel_on_disconnect"] is True
    tmp_path.chmod(0o775)  # as where a user's group is his own
    for _ in range(2):
        path = write_config(config, tmp_path)
    assert "master_key" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_extra_is_named(monkeypatch):
    require_proxy()
    monkeypatch.setattr(proxy_module, "PROXY_PACKAGES", ("no_such_package",))
    with pytest.raises(NotInstalled, match=r"\.\[proxy\]"):
        require_proxy()


@pytest.mark.parametrize("crashed", [True, False])
def test_a_worker_that_ignores_sigterm_ends(crashed, tmp_path, monkeypatch):
    monkeypatch.setattr(proxy_module, "STOP_LIMIT", 0.5)
    command, pipe = ["sh", "-c", WORKER], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, start_new_session=True) as process:
        process.stdout.readline()
        if crashed:
            process.kill()
            process.wait()
        Proxy(process, "", "", tmp_path).stop()
        process.communicate(timeout=60)  # until the worker has closed its output


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineUnavailable, match=f"port {port} on 127.0.0.1 is in use"):
            start_proxy(tmp_path / "config.yaml", {}, port=port)
