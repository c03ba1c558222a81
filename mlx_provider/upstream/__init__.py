"""Where internals of mlx, mlx-lm and mlx-vlm are read or replaced, each with file and version.

The core's own; plugins find what they need of it in `mlx_provider.families`.
"""
