"""A gateway of one command alone: what it starts, it ends, whenever that is."""

import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.errors import MLXProviderError
from mlx_provider.gateway import engine as apart
from mlx_provider.gateway.engine import warm_up
from mlx_provider.gateway.proxy import Proxy


class Idle(Proxy):
    """A proxy that is not there."""

    def stop(self) -> None:
        return


def test_a_closing_gateway_ends_an_engine_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    spawn = subprocess.Popen

    def spawned(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        seen.append(spawn(*given, **more))
        return seen[-1]  # type: ignore[no-any-return]

    def start_proxy(config: Path, environ: dict[str, str], **more: Any) -> Proxy:
        seen.append(config.parent)
        assert Path(environ["MLX_PROVIDER_RUNTIME_DIR"]) == config.parent
        return Idle(None, "", "", config)  # type: ignore[arg-type]

    def ask() -> None:
        with suppress(MLXProviderError):
            warm_up(running.engine, "demo")

    monkeypatch.setattr(subprocess, "Popen", spawned)
    monkeypatch.setattr(apart, "start_proxy", start_proxy)
    with apart.separate_gateway({}) as running:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while len(seen) < 2:
            time.sleep(0.01)
    folder, process = seen
    assert not folder.exists()
    assert process.wait(300) is not None, "it neither listened nor could be asked"
    asking.join(300)
