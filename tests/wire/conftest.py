"""A real engine on TCP with a scripted model, and the official SDKs as its clients."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_provider.testing.scripted import build, environment
from sdk_clients import anthropic_client, openai_client
from tiny import build as build_tiny

PROGRAM = """
from mlx_provider.server.run import main
main(fixed={"body_bytes": 4 * 2**20})
"""
SERVER = (sys.executable, "-P", "-c", PROGRAM, "--port", "0")
KEY, ALICE, BOB = "the-key", "key-of-alice-1234", "key-of-bob-123456"


def pytest_itemcollected(item: pytest.Item) -> None:
    """LiteLLM's own deprecations are not ours to fix."""
    item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
    item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@dataclass(frozen=True)
class Engine:
    url: str
    scripted: str
    """A model that says what it is told."""
    vectors: str
    """A model that embeds."""
    outside: str
    """The same in a folder that clients on TCP may not name."""
    http: httpx.Client
    """With the operator's key."""
    alice: httpx.Client
    """With a named key."""
    bob: httpx.Client


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("wire")
    roots = folder / "models"
    roots.mkdir()
    scripted = build(roots / "scripted", "json", context_length=2048)
    vectors = build_tiny(roots / "vectors", "qwen3", num_hidden_layers=1)
    (vectors / "1_Pooling").mkdir()
    (vectors / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    environ = environment(folder / "site", {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    outside = shutil.copytree(vectors, folder / "outside")
    variables = {"MODEL_ROOTS": str(roots)}
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"{KEY}\nalice {ALICE}\nbob {BOB}\n")
    process = subprocess.Popen(
        [*SERVER, "--api-key-file", str(keys)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environ, **{f"MLX_PROVIDER_{k}": v for k, v in variables.items()}},
    )
    said = iter(process.stderr.readline, "")
    url = re.search(r"engine on (\S+)", next(line for line in said if " engine on " in line))
    assert url is not None
    reading = threading.Thread(target=process.stderr.read)
    reading.start()
    with ExitStack() as clients:
        http, alice, bob = (
            clients.enter_context(
                httpx.Client(
                    base_url=url[1],
                    headers={"authorization": f"Bearer {key}"},
                    trust_env=False,
                    timeout=300,
                )
            )
            for key in (KEY, ALICE, BOB)
        )
        yield Engine(url[1], str(scripted), *map(str, (vectors, outside)), http, alice, bob)
    process.terminate()
    process.wait(300)
    reading.join()
    process.stderr.close()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`installed(*packages)`: the programs of an environment that has these alone."""

    def install(*packages: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        free = {n: v for n, v in os.environ.items() if n not in ("PIP_CONSTRAINT", "PYTHONPATH")}
        pip = [str(folder / "bin" / "pip"), "install", "-q", *packages]
        subprocess.run(pip, check=True, env=free)
        return folder / "bin"

    return install


@pytest.fixture
def claude(engine: Engine) -> Iterator[Any]:
    with anthropic_client(engine.url, KEY) as made:
        yield made


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai_client(engine.url, KEY) as made:
        yield made
