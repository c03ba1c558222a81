"""For authors of commands (`mlx_register_commands`): models of this machine, engines, gateways.

| name | what for |
|---|---|
| `PluginRegistry` | the plugins in use; `of(context)`: those of a command's `typer.Context` |
| `DEMOS`, `folder_of`, `checkpoint` | a model by its name: its folder and its files |
| `context_in_memory` | tokens of context that fit into this machine's memory |
| `prepare_mlx`, `preload_blas`, `active_blas` | this process, before MLX is imported |
| `load_model` | a model in this process, with the kernels that an engine would choose |
| `gateway_apart`, `Apart`, `EngineClient`, `Proxy` | an engine and a proxy of the command's own |
| `proxy_config`, `TIMEOUT`, `require_proxy` | what such a proxy serves |
| `answered` | a request to the engine, up to its end |
| `GenerateRequest`, `ModelOptions` | what the engine is asked |
| `Event`, `Delta`, `Done`, `Failed`, `EVENT_BATCH` | what it answers; `EVENT_BATCH` reads a line |
| `Health`, `ModelStatus` | what it tells of itself |
| `EngineSettings`, `PREFIX` | an engine's settings, and how the names of their variables begin |
| `installed_version` | the version of an installed distribution |
| `free_port` | a port for a server that will listen later |
| `direct` | variables by which a program reaches this machine without a proxy |
| `long_command`, `Ended`, `PASSED_ON` | a command of minutes, and its end by a signal |

Import it within a command: it is more than a listing of plugins needs. These names follow the
core: a minor version may change them, and its changelog says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client.generation import EngineClient
from .config import PREFIX, EngineSettings
from .gateway.apart import Apart, gateway_apart
from .gateway.config import TIMEOUT, proxy_config
from .gateway.engine import answered
from .gateway.foreground import PASSED_ON, Ended
from .gateway.long_command import long_command
from .gateway.models import MEMORY_SHARE, device_memory, needs
from .gateway.profile import direct
from .gateway.proxy import Proxy, free_port, require_proxy
from .installed import installed_version
from .protocol.events import EVENT_BATCH, Delta, Done, Event, Failed
from .protocol.health import Health, ModelStatus
from .protocol.options import ModelOptions
from .protocol.requests import GenerateRequest
from .registry import PluginRegistry
from .serving.checkpoint import checkpoint
from .serving.hub import DEMOS, folder_of
from .upstream import blas

if TYPE_CHECKING:
    from .records import LoadedModel

__all__ = [
    "DEMOS",
    "EVENT_BATCH",
    "PASSED_ON",
    "PREFIX",
    "TIMEOUT",
    "Apart",
    "Delta",
    "Done",
    "Ended",
    "EngineClient",
    "EngineSettings",
    "Event",
    "Failed",
    "GenerateRequest",
    "Health",
    "ModelOptions",
    "ModelStatus",
    "PluginRegistry",
    "Proxy",
    "active_blas",
    "answered",
    "checkpoint",
    "context_in_memory",
    "direct",
    "folder_of",
    "free_port",
    "gateway_apart",
    "installed_version",
    "load_model",
    "long_command",
    "preload_blas",
    "prepare_mlx",
    "proxy_config",
    "require_proxy",
]


def prepare_mlx() -> None:
    """Set up this process as an engine's; call before MLX is imported.

    Raises `NotInstalled` where MLX is missing.
    """
    from .server.run import prepare_mlx as prepare

    prepare()


def preload_blas() -> str:
    """Load the BLAS that an engine would use, alone; its name. Call before MLX is imported."""
    return blas.preload()


def active_blas() -> str:
    """The BLAS that MLX calls in this process."""
    return blas.active()


def context_in_memory(model: str, most: int) -> int:
    """Tokens of context, at most `most`, for which a model leaves room in memory. Imports MLX."""
    from .families.estimate import context_that_fits

    memory = int(MEMORY_SHARE * device_memory())
    return context_that_fits(needs(checkpoint(model)), memory, most)


def load_model(folder: Path, dtype: str | None = None, **options: Any) -> LoadedModel:
    """Load a checkpoint with the family that serves it and the kernels that an engine would choose.

    `dtype`: unset: the checkpoint's own. `options`: the other fields of `LoadOptions`.
    """
    from .families.checkpoint import read_json
    from .records import LoadOptions
    from .serving.kernels import equip

    registry = PluginRegistry.discover()
    family, _ = registry.family_for(read_json(folder / "config.json"))
    loaded = family.load(folder, LoadOptions(dtype=dtype, **options))
    equip(loaded, registry)
    return loaded
