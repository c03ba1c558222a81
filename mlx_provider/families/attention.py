"""Attention over rows whose caches stay apart; without it rows decode merged, or one by one.

`route(model)`, once after loading, makes the attention of mlx-lm's and mlx-vlm's models understand
groups of rows. A model's own layers must call a `scaled_dot_product_attention` that stands at the
top of their module, imported from `mlx_lm.models.base`.

`Watched(model, watch)`, for the time of a `with` block, shows what each layer's attention compares.
"""

from ..upstream.attention import Watched, route

__all__ = ["Watched", "route"]
