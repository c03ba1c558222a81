"""Reads or replaces internals of mlx, mlx-lm and mlx-vlm. Each place names file and version.

Only for the core; plugins use `mlx_provider.families`.
"""
