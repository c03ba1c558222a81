"""Fixtures for tests of plugins, and `--mlx-conformance`. pytest finds this module by itself. Every
pytest run in an environment with this package imports it, so slow imports are inside the functions
that need them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .conformance import hooks

if TYPE_CHECKING:
    from ..gateway.proxy import Proxy
    from ..records import LoadedModel
    from .engine_process import EngineProcess

OPTION = "--mlx-conformance"
NEEDED = "hypothesis"
EACH_CACHE = ("qwen3", "gemma3_text", "llama4", "rwkv7", "qwen3_5_text", "nemotron_h")
"""Tiny models of each kind of cache: whole, sliding windows, chunks, states, and states beside
whole ones, in two orders."""


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
    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    """With the option, run the checks, and tests that are named beside it."""
    names = config.getoption(OPTION)
    if not names:
        return
    if importlib.util.find_spec(NEEDED) is None:
        raise pytest.UsageError(f"{OPTION} needs {NEEDED}: pip install 'mlx-provider[testing]'")
    from .conformance.items import Collecting

    config.pluginmanager.register(Collecting(config, names), "mlx_conformance")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.fixture(scope="session")
def mlx_tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`mlx_tiny_folder("qwen3", seed=1)`: the folder of a tiny random model, written once.

    Further arguments are those of `mlx_provider.testing.tiny.build`.
    """
    built: dict[str, Path] = {}

    def get(family: str, **more: Any) -> Path:
        from .tiny import build

        key = f"{family} {more}"
        if key not in built:
            built[key] = build(tmp_path_factory.mktemp("mlx-tiny") / family, family, **more)
        return built[key]

    return get


@pytest.fixture(scope="session")
def mlx_load() -> Callable[..., LoadedModel]:
    """`mlx_load(folder)`: its model, as an engine loads it with the installed plugins. Further
    arguments are those of `LoadOptions`."""

    def load(folder: Path, **options: Any) -> LoadedModel:
        from ..commands import load_model

        return load_model(folder, **options)

    return load


@pytest.fixture(params=EACH_CACHE)
def mlx_each_cache(request: pytest.FixtureRequest, mlx_tiny_folder: Callable[..., Path]) -> Path:
    """Runs a test once for each kind of cache: the folder of a tiny model that has it."""
    return mlx_tiny_folder(request.param)


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
    found = environment(tmp_path_factory.mktemp("mlx-scripted"), own)
    return {**found, "MLX_PROVIDER_LOG_LEVEL": "error"}


@pytest.fixture(scope="session")
def mlx_engine(mlx_environment: dict[str, str]) -> Iterator[EngineProcess]:
    """An engine process of this environment's plugins, and of the scripted family; it ends with
    the session. `mlx_engine.ask("Hello", model=str(folder))` gives status and events."""
    from .engine_process import engine_process

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
