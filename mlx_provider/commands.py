"""For authors of commands (`mlx_register_commands`): models of this machine, engines, gateways.

| name | what for |
|---|---|
| `PluginRegistry` | the plugins in use; `of(context)`: those of a command's `typer.Context` |
| `DEMOS`, `folder_of`, `full_name`, `checkpoint` | a model by its name: folder, name, files |
| `context_in_memory` | tokens of context that fit into this machine's memory |
| `prepare_mlx`, `preload_blas`, `active_blas` | this process, before MLX is imported |
| `load_model` | a model in this process, with the kernels that an engine would choose |
| `gateway_apart`, `Apart`, `EngineClient`, `Proxy` | a separate engine and a proxy for a command |
| `proxy_config`, `TIMEOUT`, `require_proxy` | the configuration of such a proxy |
| `answered` | the complete reply of the engine to a request |
| `GenerateRequest`, `ModelOptions` | a request to the engine |
| `Event`, `Delta`, `Done`, `Failed`, `EVENT_BATCH` | its reply; `EVENT_BATCH` reads a line |
| `Health`, `ModelStatus` | its state |
| `EngineSettings`, `PREFIX` | an engine's settings, and the prefix of their variables |
| `installed_version` | the version of an installed distribution |
| `free_port` | a free port for a server |
| `direct` | variables that let a program connect to this machine without an HTTP proxy |
| `long_command`, `Ended`, `PASSED_ON` | a long command, and its end by a signal |

Import it inside a command, because a list of plugins does not need it. These names follow the
core: a minor version can change them, with a note in the changelog.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client.generation import EngineClient
from .config import PREFIX, EngineSettings
from .gateway.config import TIMEOUT, proxy_config
from .gateway.foreground import PASSED_ON, Ended, long_command
from .gateway.models import MEMORY_SHARE, device_memory, needs
from .gateway.profile import direct
from .gateway.progress import answered
from .gateway.proxy import Proxy, free_port, require_proxy
from .gateway.start import Apart, gateway_apart
from .installed import installed_version
from .protocol.events import EVENT_BATCH, Delta, Done, Event, Failed
from .protocol.health import Health, ModelStatus
from .protocol.requests import GenerateRequest, ModelOptions
from .registry import PluginRegistry
from .serving.hub import DEMOS, checkpoint, folder_of, full_name
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
    "full_name",
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
    """Set up this process like an engine process. Call it before MLX is imported.

    Raises `NotInstalled` if MLX is missing.
    """
    from .server.run import prepare_mlx as prepare

    prepare()


def preload_blas() -> str:
    """Load only the BLAS that an engine would use. Returns its name. Call before MLX is
    imported."""
    return blas.preload()


def active_blas() -> str:
    """The BLAS that MLX calls in this process."""
    return blas.active()


def context_in_memory(model: str, most: int) -> int:
    """Tokens of context, at most `most`, that fit into memory with the model. Imports MLX."""
    from .families.estimate import context_that_fits

    memory = int(MEMORY_SHARE * device_memory())
    return context_that_fits(needs(checkpoint(model)), memory, most)


def load_model(folder: Path, dtype: str | None = None, **options: Any) -> LoadedModel:
    """Load a checkpoint with the family that serves it and the kernels that an engine would choose.

    `dtype`: if unset, that of the checkpoint. `options`: the other fields of `LoadOptions`.
    """
    from .families.checkpoint import read_json
    from .records import LoadOptions
    from .serving.kernels import equip

    registry = PluginRegistry.discover()
    family, _ = registry.family_for(read_json(folder / "config.json"))
    loaded = family.load(folder, LoadOptions(dtype=dtype, **options))
    equip(loaded, registry)
    return loaded
