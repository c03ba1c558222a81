"""Vision towers by mlx-vlm, and prompts with media."""
