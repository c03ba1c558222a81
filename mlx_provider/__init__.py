"""Run local MLX models behind LiteLLM. Plugins can rely on the names of this module.

Also public: `mlx_provider.errors`, `mlx_provider.cores`, the modules in the table of
`mlx_provider.families` for authors of model families, the names in `mlx_provider.commands` for
authors of commands, and `mlx_provider.testing` for tests."""

from . import records
from .errors import (
    BadRequest,
    ContextTooLong,
    MediaError,
    MLXProviderError,
    ModelNotFound,
    NotInstalled,
    RequestFailed,
    UnsupportedModel,
)
from .hookspecs import API_VERSION, hookimpl
from .records import *  # noqa: F403

__version__ = "0.1.0"

__all__ = ["API_VERSION", "hookimpl"]
__all__ += ["BadRequest", "ContextTooLong", "MLXProviderError", "MediaError", "ModelNotFound"]
__all__ += ["NotInstalled", "RequestFailed", "UnsupportedModel"]
__all__ += records.__all__
