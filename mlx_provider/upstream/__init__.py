"""Code that reads or replaces internals of mlx, mlx-lm and mlx-vlm. Each place names the upstream
file and version. Only the core imports this package; plugins use `mlx_provider.families`."""
