"""Attention over rows whose caches stay apart, without which they decode one after another.

`route(model)`, once after loading, makes the attention of mlx-lm's and mlx-vlm's models understand
the engine's groups of rows. A model with attention of its own must call the module-level
`scaled_dot_product_attention` of mlx-lm (`mlx_lm.models.base`) for it.
"""

from ..upstream.attention import route

__all__ = ["route"]
