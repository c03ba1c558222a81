"""Sparse prefill: of a long prompt only the tokens that matter, each at its own position.

After SpecPrefill (arXiv 2502.02789): a small model tells how much attention a prompt's tokens get
from what would follow it, and chunks that get little are left out. It is the operator's choice,
never a default: what is left out, the model does not know.
"""
