"""One proxy, started from what `mlx-provider init` has written, and stand-ins of clients."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from command_line import invoke
from litellm_command import write_litellm
from mlx_provider.client.connection import Connections
from mlx_provider.gateway.config import START
from mlx_provider.gateway.engine import end_engine
from mlx_provider.gateway.proxy import FOREIGN
from ports import free_port
from waiting import wait_for_proxy

FAKE = Path(__file__).with_name("fake_client.py")
IMPOSTOR = Path(__file__).with_name("impostor.py")


@dataclass(frozen=True)
class Written:
    """A folder that `init` has written to, with a proxy that was started as it said."""

    folder: Path
    told: str
    url: str
    key: str

    def get(self, path: str, **more: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.request(
            "POST" if more else "GET",
            self.url + path,
            headers=headers,
            trust_env=False,
            timeout=300,
            **more,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="session")
def runtime() -> Iterator[Path]:
    """The folder of an engine of these tests alone, which goes on from one to the next."""
    folder = Path(tempfile.mkdtemp(prefix="mlxp-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def written(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """A proxy of `mlx-provider init demo`."""
    folder = tmp_path_factory.mktemp("written")
    done = invoke("init", "demo", "--folder", str(folder), plugins=None)
    assert done.exit_code == 0, done.output
    port = free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    own |= {"PATH": f"{write_litellm(folder)}{os.pathsep}{os.environ['PATH']}", "PORT": str(port)}
    own["MLX_PROVIDER_RUNTIME_DIR"] = str(runtime)
    connections = Connections(own)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-ec", START],
            cwd=folder,
            env=own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_proxy(url, process, folder / "log")
            yield Written(folder, done.output, url, (folder / "key").read_text())
        finally:
            os.killpg(process.pid, signal.SIGTERM)
    end_engine(connections.client(None, None))
    connections.close()


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program that takes the port of each starting proxy if it can; the file of the keys that it
    got."""
    keys = tmp_path / "stolen"
    monkeypatch.setenv("STOLEN", str(keys))
    command = [sys.executable, "-SE", str(IMPOSTOR), str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield keys
        process.kill()


@pytest.fixture
def stand_in(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Put a client of this command on `PATH`, with an empty HOME; where it says what it saw."""
    folder = tmp_path / "commands"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("LAUNCHES", str(runtime / "launch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))

    def install(command: str) -> Path:
        path = folder / command
        path.write_text(f"#!{sys.executable} -SE\n{FAKE.read_text()}")
        path.chmod(0o755)
        return tmp_path / "seen.json"

    return install
