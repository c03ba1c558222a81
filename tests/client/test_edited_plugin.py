"""An engine whose plugins were edited, installed or removed: replaced when idle, told when busy."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Done
from mlx_provider.protocol.requests import GenerateRequest


@dataclass
class Toys:
    """A folder that Python imports from, with distributions that bring plugins."""

    folder: Path

    def install(self, name: str, source: str, version: str = "1.0") -> Path:
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[mlx_provider]\n{name} = {name}\n")
        package = self.folder / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(source)
        return package

    def remove(self, name: str) -> None:
        (info,) = self.folder.glob(f"{name}-*.dist-info")
        info.rename(self.folder / f"{info.name}.gone")


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toys:
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return Toys(tmp_path)


@pytest.fixture
def toy(toys: Toys) -> Path:
    package = toys.install("toy", "import toy.part\n")
    (package / "part.py").write_text("STEP = 0\n")
    return package


@pytest.fixture
def engine(local: Any, toy: Path) -> HttpClient:
    """A client whose engine runs with the toy."""
    return local.client()


def served(client: HttpClient, prompt: str = "count 1 0") -> int:
    """Serve a request to its end; the process of the engine that runs then."""
    generation, last = client.submit(GenerateRequest(model="fake", prompt=prompt)), None
    while events := generation.get(300):
        last = events[-1]
    assert isinstance(last, Done), last
    while True:
        try:
            return client.health().pid
        except EngineUnavailable:  # it is being replaced for somebody else
            time.sleep(0.01)


def test_what_replaces_an_idle_engine(
    engine: HttpClient, toys: Toys, toy: Path, local: Any
) -> None:
    other = local.client()
    pids = [served(engine), served(other)]
    assert pids[0] == pids[1]
    (toy / "notes.txt").write_text("no source")
    assert served(engine) == pids[0], "nothing was edited"
    for change in (
        lambda: (toy / "part.py").write_text("STEP = 1\n"),
        lambda: toys.install("late", "", "2.0"),
        lambda: toys.remove("late"),
    ):
        change()
        found = {served(engine), served(other)}
        assert len(found) == 1, "both are served by the new engine"
        assert not found & set(pids)
        pids += found
    assert engine.health().out_of_date == []


def test_a_busy_engine_tells_it_and_is_replaced_when_it_is_idle(
    engine: HttpClient, toy: Path, local: Any, wait_until: Any
) -> None:
    running = engine.submit(GenerateRequest(model="fake", prompt="wait"))
    first = engine.health().pid
    (toy / "part.py").write_text("STEP = 1\n")
    health = local.client().health()
    assert health.out_of_date == [
        "plugin toy: edited toy/part.py",
        "it is replaced at the next request, if no other request runs",
    ]
    assert served(engine) == first, "a busy engine goes on"
    assert (
        "out of date: plugin toy: edited toy/part.py" in (local.folder / "engine.log").read_text()
    )
    running.close()
    wait_until(lambda: served(engine) != first)


def test_a_crowd_loses_nothing_to_edits(engine: HttpClient, toy: Path, local: Any) -> None:
    clients = [engine, local.client(), local.client()]
    number = count(1)

    def one(index: int) -> int:
        if index in (5, 13):
            (toy / "part.py").write_text(f"STEP = {next(number)}\n")
        client = clients[index % 3]
        assert client.count(GenerateRequest(model="fake", prompt="a b")) == 2
        time.sleep(index % 5 * 0.1)  # now and then nobody asks
        return served(client, "count 8 0.03")

    with ThreadPoolExecutor(3) as pool:
        pids = list(pool.map(one, range(24)))
    assert len({*pids, served(engine)}) > 1, "none was replaced"


def test_who_can_start_none_is_served_by_the_old_one(
    engine: HttpClient, toy: Path, local: Any
) -> None:
    guest = HttpClient(Address("http://engine", str(local.folder / "engine.sock")))
    local.stack.callback(guest.close)
    first = served(engine)
    (toy / "part.py").write_text("STEP = 1\n")
    assert served(guest) == served(guest) == first
    assert guest.health().out_of_date
    assert served(engine) != first


def test_two_gateways_with_other_settings_do_not_fight(
    local: Any, toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = gateway(local, MLX_PROVIDER_MAX_ROWS="3")
    other = gateway(local, MLX_PROVIDER_MAX_ROWS="5")
    pid = served(one)
    assert {served(each) for _ in range(2) for each in (other, one)} == {pid}
    assert "MLX_PROVIDER_MAX_ROWS: 3, here 5" in caplog.text
    assert "MLX_PROVIDER_RUNTIME_DIR gives each its own engine" in caplog.text
    (toy / "part.py").write_text("STEP = 1\n")
    pid = served(other)  # it replaces the old one, with its own settings
    assert {served(each) for _ in range(2) for each in (one, other)} == {pid}


def gateway(local: Any, **environment: str) -> HttpClient:
    from mlx_provider.client.runtime_folder import identity

    here = local.runtime(**environment)
    client = HttpClient(
        Address("http://engine", str(here.socket)),
        start=local.engine(**environment).ensure,
        identity=lambda: identity(here.environment),
    )
    local.stack.callback(client.close)
    return client


def test_a_remote_engine_only_tells_it(toy: Path, tcp_engine: str) -> None:
    client = HttpClient(Address(tcp_engine), "secret")
    first = served(client)
    (toy / "part.py").write_text("STEP = 1\n")
    assert served(client) == first
    assert client.health().out_of_date == [
        "plugin toy: edited toy/part.py",
        "it continues unchanged until its operator restarts it",
    ]
    client.close()


def test_a_name_that_is_found_anew_is_not_another_plugin(toys: Toys, toy: Path) -> None:
    """What is watched: packages in packages, and modules."""
    (toys.folder / "space" / "inner").mkdir(parents=True)
    (toys.folder / "space" / "inner" / "__init__.py").write_text("")
    (toys.folder / "alone.py").write_text("")
    script = f"""
import sys
sys.path.insert(0, {str(toys.folder)!r})
from importlib.metadata import EntryPoint
from mlx_provider.registry.discovery import times
for module in ("toy", "space.inner", "alone", "toy.part", "nowhere", "nowhere.else"):
    print(sorted(times(EntryPoint("x", module, "mlx_provider"))))
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    found = [line.replace(f"{toys.folder}/", "") for line in told.stdout.splitlines()]
    assert found == [
        "['toy/__init__.py', 'toy/part.py']",
        "['space/inner/__init__.py']",
        "['alone.py']",
        "['toy/__init__.py', 'toy/part.py']",
        "[]",
        "[]",
    ]
