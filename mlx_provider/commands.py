"""For authors of commands (`mlx_register_commands`): models of this machine, engines, gateways.

| name | what for |
|---|---|
| `PluginRegistry` | the plugins in use; `of(context)`: those of a command's `typer.Context` |
| `DEMOS`, `folder_of`, `full_name`, `checkpoint` | a model by its name: folder, name, files |
| `context_in_memory` | tokens of context that fit into this machine's memory |
| `prepare_mlx`, `preload_blas`, `active_blas` | this process, before MLX is imported |
| `load_model` | a model in this process, with the kernels that an engine would choose |
| `separate_engine`, `EngineClient` | a separate engine for a command |
| `separate_gateway`, `SeparateGateway`, `Proxy` | a separate engine and a proxy for a command |
| `proxy_config`, `TIMEOUT`, `require_proxy` | the configuration of such a proxy |
| `run_request` | runs a request to its end |
| `GenerateRequest`, `ModelOptions` | a request to the engine |
| `Delta`, `Done`, `Failed` | the events of its reply |
| `Health`, `ModelStatus` | its state |
| `EngineSettings`, `PREFIX` | an engine's settings, and the prefix of their variables |
| `installed_version` | the version of an installed distribution |
| `direct` | variables that let a program connect to this machine without an HTTP proxy |
| `long_command`, `Ended` | a long command, and its end by a signal |

Import it inside a command, because a list of plugins does not need it. These names follow the
core: a minor version can change them, with a note in the changelog.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client.generation import EngineClient
from .config import PREFIX, EngineSettings, installed_version
from .gateway.config import TIMEOUT, proxy_config
from .gateway.engine import SeparateGateway, run_request, separate_engine, separate_gateway
from .gateway.foreground import Ended, ending_by_signal
from .gateway.launch import direct
from .gateway.models import MEMORY_SHARE, device_memory, needs
from .gateway.proxy import Proxy, require_proxy
from .protocol.events import Delta, Done, Failed
from .protocol.health import Health, ModelStatus
from .protocol.requests import GenerateRequest, ModelOptions
from .registry import PluginRegistry
from .serving.hub import DEMOS, checkpoint, folder_of, full_name
from .upstream.blas import active as active_blas
from .upstream.blas import preload as preload_blas

if TYPE_CHECKING:
    from .records import LoadedModel

__all__ = [
    "DEMOS",
    "PREFIX",
    "TIMEOUT",
    "Delta",
    "Done",
    "Ended",
    "EngineClient",
    "EngineSettings",
    "Failed",
    "GenerateRequest",
    "Health",
    "ModelOptions",
    "ModelStatus",
    "PluginRegistry",
    "Proxy",
    "SeparateGateway",
    "active_blas",
    "checkpoint",
    "context_in_memory",
    "direct",
    "folder_of",
    "full_name",
    "installed_version",
    "load_model",
    "long_command",
    "preload_blas",
    "prepare_mlx",
    "proxy_config",
    "require_proxy",
    "run_request",
    "separate_engine",
    "separate_gateway",
]
EVERY = 10.0


def prepare_mlx() -> None:
    """Set up this process like an engine process. Call it before MLX is imported.

    Raises `NotInstalled` if MLX is missing.
    """
    from .server.run import prepare_mlx as prepare

    prepare()


def context_in_memory(model: str, most: int) -> int:
    """Tokens of context, at most `most`, that fit into memory with the model. Imports MLX."""
    from .serving.estimate import context_that_fits

    memory = int(MEMORY_SHARE * device_memory())
    return context_that_fits(needs(checkpoint(model)), memory, most)


def load_model(folder: Path, dtype: str | None = None, **options: Any) -> LoadedModel:
    """Load a checkpoint with the family that serves it and the kernels that an engine would choose.

    `dtype`: if unset, that of the checkpoint. `options`: the other fields of `LoadOptions`.
    """
    from .families.checkpoint import read_json
    from .records import LoadOptions
    from .serving.loader import equip

    registry = PluginRegistry.discover()
    family, _ = registry.family_for(read_json(folder / "config.json"))
    loaded = family.load(folder, LoadOptions(dtype=dtype, **options))
    equip(loaded, registry)
    return loaded


class Progress:
    """Repeats the last report while nothing new is reported."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._began = time.monotonic()
        self._what = "running"

    def report(self, what: str, mark: str = "") -> None:
        """`what`: what begins now, or a value that was measured."""
        self._what = what
        self._tell(f"{time.monotonic() - self._began:5.0f} s  {mark}{what}")

    def repeat(self, every: float, done: threading.Event) -> None:
        while not done.wait(every):
            self.report(self._what, "... ")


@contextmanager
def long_command(tell: Callable[[str], None], *, every: float | None = None) -> Iterator[Progress]:
    """Run the block in the main thread, see `ending_by_signal`. `tell` gets lines of progress, one
    at least every `every` seconds (unset: `EVERY`)."""
    done, progress = threading.Event(), Progress(tell)
    threading.Thread(target=progress.repeat, args=(every or EVERY, done), daemon=True).start()
    try:
        with ending_by_signal("\nending the servers that were started ...\n"):
            yield progress
    finally:
        done.set()
