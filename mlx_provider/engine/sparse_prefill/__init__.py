"""Sparse prefill: computes only the important tokens of a long prompt, each at its own position.

After SpecPrefill (arXiv 2502.02789): a small model estimates how much attention the tokens of a
prompt get from later tokens, and chunks with little attention are left out. Only the operator can
enable it: the model does not see the tokens that are left out.
"""
