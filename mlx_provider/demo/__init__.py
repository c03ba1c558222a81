"""What `mlx-provider demo` starts and asks."""
