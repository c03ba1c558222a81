"""A model's tokenizer and chat template: encode, decode, render, place snapshot points.

Clients' text stays text: what looks like a control token is spelled in letters. The names below are
public for authors of families; the modules of this package are not."""

from .hf_tokenizer import HFTokenizer, common_length, load_tokenizer
from .spelling import Hidden

__all__ = ["HFTokenizer", "Hidden", "common_length", "load_tokenizer"]
