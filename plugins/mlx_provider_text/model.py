"""What this family's models are: see `mlx_provider.upstream.mlx_lm_model`."""

from mlx_provider.upstream.mlx_lm_model import TextModel, load_text

__all__ = ["TextModel", "load_text"]
