"""`mlx-provider bench ranks`: one model over several processes, beside mlx-lm's server."""
