"""An engine whose plugins were edited, installed or removed: replaced when nobody else uses it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Done
from mlx_provider.protocol.requests import GenerateRequest
from python_process import run_python


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
    monkeypatch.syspath_prepend(tmp_path)
    return Toys(tmp_path)


@pytest.fixture
def toy(toys: Toys) -> Path:
    package = toys.install("toy", "import toy.part\n")
    (package / "part.py").write_text("STEP = 0\n")
    return package


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


def test_edited_plugins_replace_an_otherwise_idle_engine(toys: Toys, toy: Path, local: Any) -> None:
    pids = [one_request(local)]
    (toy / "notes.txt").write_text("no source")
    assert one_request(local) == pids[0], "nothing was edited"
    for change in (
        lambda: (toy / "part.py").write_text("STEP = 1\n"),
        lambda: toys.install("late", "", "2.0"),
        lambda: toys.remove("late"),
    ):
        change()
        pids.append(one_request(local))
        assert pids[-1] not in pids[:-1]
        assert one_request(local) == pids[-1]


def test_a_plugin_beside_a_script_replaces_no_engine(
    toys: Toys, local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, which other programs use, cannot find it."""
    pid = one_request(local)
    beside = Toys(tmp_path / "script")
    beside.folder.mkdir()
    beside.install("own", "")
    monkeypatch.syspath_prepend(beside.folder)
    assert [one_request(local), one_request(local)] == [pid, pid]


def test_an_engine_in_use_keeps_running_and_the_edited_plugin_is_logged(
    toy: Path, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = gateway(local)
    pid = served(first)
    (toy / "part.py").write_text("STEP = 1\n")
    assert served(gateway(local)) == served(first) == pid
    assert "plugin toy: toy 1.0, digest " in caplog.text


def test_two_gateways_with_different_settings_do_not_replace_the_engine(
    local: Any, toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = gateway(local, MLX_PROVIDER_MAX_ROWS="3")
    other = gateway(local, MLX_PROVIDER_MAX_ROWS="5")
    pid = served(one)
    assert {served(each) for _ in range(2) for each in (other, one)} == {pid}
    assert "MLX_PROVIDER_MAX_ROWS: 3, here 5" in caplog.text
    assert "MLX_PROVIDER_RUNTIME_DIR gives each its own engine" in caplog.text


def one_request(local: Any) -> int:
    client = gateway(local)
    pid = served(client)
    client.close()
    return pid


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


def test_the_watched_files_of_a_plugin_are_its_modules_and_packages(toys: Toys, toy: Path) -> None:
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
    told = run_python(script).stdout
    found = [line.replace(f"{toys.folder}/", "") for line in told.splitlines()]
    assert found == [
        "['toy/__init__.py', 'toy/part.py']",
        "['space/inner/__init__.py']",
        "['alone.py']",
        "['toy/__init__.py', 'toy/part.py']",
        "[]",
        "[]",
    ]
