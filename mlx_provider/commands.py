"""Functions for authors of commands (`mlx_register_commands`), to use models, engines and gateways.

Import it inside the function of the command: listing the plugins must not load it. These names
follow the core: a minor version can change them, with a note in the changelog."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client.http import HttpClient as EngineClient
from .config import PREFIX, installed_version
from .gateway.config import TIMEOUT, proxy_config
from .gateway.engine import SeparateGateway, run_request, separate_engine, separate_gateway
from .gateway.foreground import END_SIGNALS, ending_by_signal
from .gateway.models import device_memory, footprint_of, request_memory
from .gateway.proxy import Proxy, require_proxy
from .protocol.events import Delta, Done, Failed
from .protocol.health import ModelStatus
from .protocol.requests import GenerateRequest, ModelOptions
from .registry import PluginRegistry
from .serving.hub import checkpoint, folder_of, full_name
from .settings import EngineSettings
from .upstream.runtime import active_blas, preload_blas

if TYPE_CHECKING:
    from .records import LoadedModel

# a gateway, or an engine alone
__all__ = ["TIMEOUT", "Proxy", "SeparateGateway", "long_command", "proxy_config", "require_proxy"]
__all__ += ["separate_engine", "separate_gateway"]
# requests to an engine
__all__ += ["Delta", "Done", "EngineClient", "Failed", "GenerateRequest", "ModelOptions"]
__all__ += ["ModelStatus", "run_request"]
# models
__all__ += ["checkpoint", "context_in_memory", "folder_of", "full_name", "load_model"]
# this process and its settings
__all__ += ["PREFIX", "EngineSettings", "PluginRegistry", "active_blas", "installed_version"]
__all__ += ["preload_blas", "prepare_mlx"]


def prepare_mlx() -> None:
    """Set up this process like an engine process, before MLX is imported. Raises `NotInstalled`."""
    from .server.run import prepare_mlx as prepare

    prepare()


def context_in_memory(model: str, limit: int) -> int:
    """Tokens of context, at most `limit`, that fit into memory with the model. Imports MLX."""
    from .serving.estimate import context_that_fits

    memory = request_memory(device_memory())
    return context_that_fits(footprint_of(checkpoint(model)), memory, limit)


def load_model(folder: Path, dtype: str | None = None, **options: Any) -> LoadedModel:
    """Load a checkpoint with the family and the kernels that an engine would choose. `dtype`: if
    unset, its own. `options`: other fields of `LoadOptions`. Raises errors of `errors`."""
    from .families.checkpoint import read_json
    from .records import LoadOptions
    from .serving.loader import equip

    registry = PluginRegistry.discover()
    family, _ = registry.family_for(read_json(folder / "config.json"))
    loaded = family.load(folder, LoadOptions(dtype=dtype, **options))
    equip(loaded, registry)
    return loaded


@contextmanager
def long_command(tell: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """For a `with` block in the main thread. A signal that ends a process, such as Ctrl-C, ends the
    block after its clean-ups with `SystemExit`; further signals are ignored. Yields a function that
    reports progress: it gives its text to `tell`, after the seconds since the start."""
    began = time.monotonic()
    try:
        with ending_by_signal("\nending the servers that were started ...\n"):
            yield lambda what: tell(f"{time.monotonic() - began:5.0f} s  {what}")
    except SystemExit:
        for number in END_SIGNALS:  # the process is about to end
            signal.signal(number, signal.SIG_IGN)
        raise
