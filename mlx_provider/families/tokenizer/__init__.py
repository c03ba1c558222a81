"""A model's tokenizer and chat template: encode, decode, render, place snapshot points.

Clients' text stays text: what looks like a control token is spelled in letters. Authors of families
may use the names below, but not the modules of this package."""

from .hf_tokenizer import HFTokenizer, common_length, load_tokenizer
from .spelling import Hidden

__all__ = ["HFTokenizer", "Hidden", "common_length", "load_tokenizer"]
