"""The records and types of the plugin interface."""

from .attention import Part, Parts, Run, parts_of
from .blocks import read_block, scan_block
from .claims import claimed, through
from .client import Client, ClientServer, ClientSettings, Gateway, Profile
from .drafter import (
    DeviceTokens,
    Drafter,
    Drafting,
    DraftOptions,
    DraftRow,
    DraftsAhead,
    ScoresPrompts,
    Scoring,
    Unread,
)
from .embedding import Embedding, Pooling
from .grammar import CallGrammar, MessageGrammar, TaggedArguments
from .json_reading import read_json
from .kernels import Function, Kernels, Replacement
from .marked import read_marked, report_call
from .model import (
    EmbedsInSlices,
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
    SamplingDefaults,
    ShowsHidden,
    ShowsLogits,
    Tokenizer,
)
from .parameters import listed_parameters, listed_values, resolved, type_of, value_types
from .parsing import ReasoningParser, ToolCall, ToolParser, Tools
from .reading import Emit, NotACall, Reading, Rest, TextEnded, TextReader
from .template import TemplateForm
from .turn_ends import read_turn_ends
from .upstream import UpstreamPatch

__all__ = [
    "CallGrammar",
    "Client",
    "ClientServer",
    "ClientSettings",
    "DeviceTokens",
    "DraftOptions",
    "DraftRow",
    "Drafter",
    "Drafting",
    "DraftsAhead",
    "Embedding",
    "EmbedsInSlices",
    "Emit",
    "Features",
    "Function",
    "Gateway",
    "Kernels",
    "LoadOptions",
    "LoadedModel",
    "MediaItem",
    "MediaSpan",
    "MessageGrammar",
    "ModelFamily",
    "ModelInfo",
    "NotACall",
    "OnDemand",
    "Part",
    "Parts",
    "Pooling",
    "PrefillChunk",
    "Profile",
    "Prompt",
    "Reading",
    "ReasoningParser",
    "Replacement",
    "Rest",
    "Run",
    "SamplingDefaults",
    "ScoresPrompts",
    "Scoring",
    "ShowsHidden",
    "ShowsLogits",
    "TaggedArguments",
    "TemplateForm",
    "TextEnded",
    "TextReader",
    "Tokenizer",
    "ToolCall",
    "ToolParser",
    "Tools",
    "Unread",
    "UpstreamPatch",
    "claimed",
    "listed_parameters",
    "listed_values",
    "parts_of",
    "read_block",
    "read_json",
    "read_marked",
    "read_turn_ends",
    "report_call",
    "resolved",
    "scan_block",
    "through",
    "type_of",
    "value_types",
]
