"""A model's tokenizer and chat template: encode, decode, render, place snapshot points.

Everything that a client sends stays text: what looks like a control token in it is spelt in
letters. The names below are for authors of families; the modules of this package are not.
"""

from .hf_tokenizer import HFTokenizer, Rendered, common_length
from .loading import load_tokenizer
from .sanitize import Hidden

__all__ = ["HFTokenizer", "Hidden", "Rendered", "common_length", "load_tokenizer"]
