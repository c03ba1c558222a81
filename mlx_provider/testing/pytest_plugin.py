"""Fixtures for tests of plugins, the engine process behind them, and `--mlx-conformance`. Every
pytest run in an environment with this package imports this module: slow imports are inside the
functions that need them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

    from ..gateway.proxy import Proxy
    from ..records import LoadedModel


OPTION = "--mlx-conformance"
NEEDED = "hypothesis"
REQUEST_SECONDS = 120.0
PROGRAM = """
import json, sys
from mlx_provider.server.__main__ import run_process
run_process(json.loads(sys.argv.pop()))
"""


class Hooks:
    @pytest.hookspec
    def pytest_mlx_conformance_models(  # type: ignore[empty-body]
        self, name: str
    ) -> Mapping[str, Callable[[Path], object]]:
        """Checkpoints for the record `name` of a plugin (a family, a drafter, kernels), by label.

        Each value writes one into an empty folder, in the form that users download: weights,
        `config.json`, tokenizer, chat template. For a drafter it may return the `DraftOptions`. Put
        the hook into the `conftest.py` of the plugin's tests.
        """


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mlx-provider", "plugins of mlx-provider")
    group.addoption(
        OPTION,
        action="append",
        default=[],
        metavar="PLUGIN",
        help="check an installed plugin of mlx-provider, by the name of its entry point "
        "(repeatable; without further arguments nothing else runs)",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    """With the option, run the checks, and tests that are named beside it."""
    names = config.getoption(OPTION)
    if not names:
        return
    if importlib.util.find_spec(NEEDED) is None:
        raise pytest.UsageError(f"{OPTION} needs {NEEDED}: pip install 'mlx-provider[testing]'")
    from .conformance import Collecting

    config.pluginmanager.register(Collecting(config, names), "mlx_conformance")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@dataclass(frozen=True)
class EngineProcess:
    """`http` speaks to its socket."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    socket: Path

    def ask(self, content: Any, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        """Status and events of a request with one user message; an error is the one event."""
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
        return self.post(json.dumps({"max_tokens": 1, **body}).encode())

    def post(self, body: Any, **options: Any) -> tuple[int, list[dict[str, Any]]]:
        reply = self.http.post("/v1/generate", content=body, **options)
        if reply.status_code != 200:
            return reply.status_code, [reply.json()["error"]]
        return 200, [event for line in reply.text.splitlines() for event in json.loads(line)]

    def memory(self, which: str) -> int:
        """`VmRSS` (now) or `VmHWM` (peak) in bytes (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(which))
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> int:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory("VmRSS")


@contextmanager
def engine_process(
    fixed: Mapping[str, Any] = MappingProxyType({}), **environ: str
) -> Iterator[EngineProcess]:
    """With this environment and these variables. `fixed`: values that no variable sets
    (`config.FixedSettings`)."""
    import httpx

    folder = Path(tempfile.mkdtemp(prefix="mlxp-"))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps({"log_level": "error", **fixed})],
        env={**os.environ, **environ, "MLX_PROVIDER_RUNTIME_DIR": str(folder)},
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        while b" engine on " not in (line := process.stderr.readline()):
            assert line, "the engine did not start"
        socket = folder / "engine.sock"
        transport = httpx.HTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None))
        with httpx.Client(
            base_url="http://engine", transport=transport, timeout=REQUEST_SECONDS, trust_env=False
        ) as http:
            yield EngineProcess(process, http, socket)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def mlx_load() -> Callable[..., LoadedModel]:
    """`mlx_load(folder)`: its model, as an engine loads it with the installed plugins. Further
    arguments are those of `LoadOptions`."""

    def load(folder: Path, **options: Any) -> LoadedModel:
        from ..commands import load_model

        return load_model(folder, **options)

    return load


@pytest.fixture(scope="session")
def mlx_scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`mlx_scripted_folder("json")`: a model that says what it is told, and calls the tools that
    it is told to call; see `mlx_provider.testing.scripted`."""
    built: dict[str, Path] = {}

    def get(calls: str = "json", **more: Any) -> Path:
        from .scripted import build

        key = f"{calls} {more}"
        if key not in built:
            built[key] = build(tmp_path_factory.mktemp("mlx-scripted") / calls, calls, **more)
        return built[key]

    return get


@pytest.fixture(scope="session")
def mlx_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for processes that find the modules of this one, and the scripted family."""
    from .scripted import environment

    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return environment(tmp_path_factory.mktemp("mlx-scripted"), own)


@pytest.fixture(scope="session")
def mlx_engine(mlx_environment: dict[str, str]) -> Iterator[EngineProcess]:
    """An engine process of this environment's plugins, and of the scripted family; it ends with
    the session. `mlx_engine.ask("Hello", model=str(folder))` gives status and events."""
    with engine_process({}, **mlx_environment) as engine:
        yield engine


@pytest.fixture(scope="session")
def mlx_proxy(
    mlx_engine: EngineProcess,
    mlx_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Proxy]]:
    """`mlx_proxy(folder)`: a LiteLLM proxy (`url`, `key`) before `mlx_engine`, whose clients ask
    for the model in that folder as `model`. Needs `mlx-provider[proxy]`; ends with the session."""
    from ..gateway.config import Served, served_config, write_config
    from ..gateway.proxy import start_proxy

    with ExitStack() as ending:

        def start(folder: Path, name: str = "model", context: int = 32_768) -> Proxy:
            served = Served(name, str(folder), context, output=context // 4)
            config = write_config(served_config(served, ()), tmp_path_factory.mktemp("mlx-proxy"))
            own = {**os.environ, **mlx_environment}
            own["MLX_PROVIDER_RUNTIME_DIR"] = str(mlx_engine.socket.parent)
            proxy = start_proxy(config, own)
            ending.callback(proxy.stop)
            proxy.wait_ready()
            return proxy

        yield start
