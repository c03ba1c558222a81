"""Sparse prefill: computes only the important tokens of a long prompt, each at its own position.

After SpecPrefill (arXiv 2502.02789): a small model estimates the attention that tokens get from
later ones; chunks with little are left out. The model does not see them, so only the operator can
enable it.
"""
