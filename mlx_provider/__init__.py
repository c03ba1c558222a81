"""Run local MLX models behind LiteLLM. These names are what plugins may rely on."""

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
from .records import (
    Features,
    LoadedModel,
    LoadOptions,
    MediaItem,
    MediaSpan,
    ModelFamily,
    ModelInfo,
    OnDemand,
    PrefillChunk,
    Prompt,
    ReasoningParser,
    SamplingDefaults,
    Tokenizer,
    ToolCall,
    ToolParser,
)

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "BadRequest",
    "ContextTooLong",
    "Features",
    "LoadOptions",
    "LoadedModel",
    "MLXProviderError",
    "MediaError",
    "MediaItem",
    "MediaSpan",
    "ModelFamily",
    "ModelInfo",
    "ModelNotFound",
    "NotInstalled",
    "OnDemand",
    "PrefillChunk",
    "Prompt",
    "ReasoningParser",
    "RequestFailed",
    "SamplingDefaults",
    "Tokenizer",
    "ToolCall",
    "ToolParser",
    "UnsupportedModel",
    "hookimpl",
]
