"""Prevents that text of clients becomes a control token.

`marks` replaces characters of control tokens in a client's strings before the template is rendered.
`spelling` spells the marked text in letters when the rendered text is tokenized.

transformers 5.23 has `sanitize_control_tokens`. It does not cover keys of mappings, tokens that a
template joins from parts, tokens that a normalizer makes, and vocabularies with control tokens. It
gives no offsets, renders in this process, and is missing in the lowest supported version.
"""

from .control_tokens import ControlTokens
from .marks import Hidden, Messages, Variables, hide
from .spelling import Encoded, spelt
from .template_check import keeps_marks

__all__ = [
    "ControlTokens",
    "Encoded",
    "Hidden",
    "Messages",
    "Variables",
    "hide",
    "keeps_marks",
    "spelt",
]
