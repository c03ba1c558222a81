"""A model that two processes of `mlx.launch` share, as an entry of a LiteLLM proxy."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from ports import free_port
from sdk_clients import openai_client
from tiny import build

from .fleet_processes import KEY, LARGER, PAGE, Proxy, wait_for, written


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("large")
    port, ring, config = free_port(), free_port(), deepcopy(LARGER)
    config["model_list"][0]["litellm_params"]["api_base"] = f"http://127.0.0.1:{port}/v1"
    proxy = Proxy(written(folder / "proxy", config), {})
    log = folder / "log"
    with log.open("wb") as output:
        launched = subprocess.Popen(
            command(build(folder / "model", "llama"), port, ring),
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(
            lambda: httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False), launched, log
        )
        proxy.start()
        proxy.wait()
        yield proxy
    finally:
        proxy.end()
        os.killpg(launched.pid, signal.SIGTERM)
        launched.wait()


def command(model: Path, port: int, ring: int) -> list[str]:
    """The page's command with two processes of this machine in place of its hosts."""
    (line,) = re.findall(r"^mlx\.launch .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    line = line.replace("--hostfile hosts.json", f"-n 2 --starting-port {ring}")
    return shlex.split(line.replace("/models/large", str(model)).replace("8090", str(port)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_distributed_over_two_processes_answers(proxy: Proxy, stream: bool) -> None:
    given: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    with openai_client(proxy.url, KEY) as client:
        found = client.chat.completions.create(model="large", stream=stream, **given)
        if stream:
            text = "".join(c.delta.content or "" for each in found for c in each.choices)
        else:
            text = found.choices[0].message.content
            assert found.usage.completion_tokens == 8
    assert text
