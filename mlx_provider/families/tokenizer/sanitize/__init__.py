"""Prevents clients' text from becoming a control token.

`marks` replaces characters of control tokens in a client's strings before the template is rendered.
`spelling` spells the marked text in letters when the rendered text is tokenized.

`sanitize_control_tokens` of transformers 5.23 does not suffice: it lacks keys of mappings, tokens
that a template joins or a normalizer makes, vocabularies with control tokens, and offsets, and it
renders in this process.
"""

from .control_tokens import ControlTokens
from .spelling import Encoded, Hidden, Messages, Variables, hide, spelt

__all__ = [
    "ControlTokens",
    "Encoded",
    "Hidden",
    "Messages",
    "Variables",
    "hide",
    "spelt",
]
