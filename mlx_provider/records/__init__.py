"""The records and types of the plugin interface. `model`: loading and running a checkpoint;
`parsing`, with three modules about reading: calls and thoughts; `extensions`: all others."""

# ruff: noqa: F403, F405
from .blocks import *
from .extensions import *
from .json_reading import *
from .model import *
from .parsing import *
from .reading import *

# models
__all__ = ["Embedding", "LoadOptions", "LoadedModel", "ModelFamily", "ModelInfo", "Pooling"]
__all__ += ["SamplingDefaults", "TemplateForm", "Tokenizer"]
# prompts and passes
__all__ += ["Features", "MediaItem", "MediaSpan", "OnDemand", "PrefillChunk", "Prompt"]
__all__ += ["HiddenStatesModel", "PromptLogitsModel"]
# drafters
__all__ += ["DeviceTokens", "DraftOptions", "DraftRow", "Drafter", "Drafting"]
__all__ += ["ScoresPrompts", "Scoring"]
# kernels
__all__ += ["Function", "Kernels", "Part", "Parts", "Replacement", "Run", "UpstreamPatch"]
__all__ += ["parts_of"]
# clients
__all__ += ["Client", "Gateway", "Profile"]
# formats of calls and thoughts
__all__ += ["CallGrammar", "MessageGrammar", "ReasoningParser", "TaggedArguments", "ToolCall"]
__all__ += ["ToolParser", "Tools"]
# reading replies
__all__ += ["Emit", "NotACall", "Reading", "ShowText", "TextEnded", "TextReader", "read_turn_ends"]
__all__ += ["claim", "read_block", "read_marked", "report_call", "scan_block", "show_through"]
__all__ += ["JsonReader", "listed_parameters", "listed_values", "read_json", "resolve", "type_of"]
__all__ += ["value_types"]
