"""What crosses the plugin seam."""

from .marked import read_marked
from .model import (
    Features,
    LoadedModel,
    LoadOptions,
    MediaItem,
    MediaSpan,
    ModelFamily,
    ModelInfo,
    PrefillChunk,
    Prompt,
    SamplingDefaults,
    Tokenizer,
)
from .parsing import ReasoningParser, ToolCall, ToolParser, Tools
from .reading import Emit, NotACall, Reading, TextEnded, TextReader

__all__ = [
    "Emit",
    "Features",
    "LoadOptions",
    "LoadedModel",
    "MediaItem",
    "MediaSpan",
    "ModelFamily",
    "ModelInfo",
    "NotACall",
    "PrefillChunk",
    "Prompt",
    "Reading",
    "ReasoningParser",
    "SamplingDefaults",
    "TextEnded",
    "TextReader",
    "Tokenizer",
    "ToolCall",
    "ToolParser",
    "Tools",
    "read_marked",
]
