"""Attention over rows with separate caches; without it rows decode merged, or one by one.

`route(model)`, once after loading, makes the attention of mlx-lm's and mlx-vlm's models understand
groups of rows. A model's own layers must call a `scaled_dot_product_attention` that stands at the
top of their module, imported from `mlx_lm.models.base`.

Inside `with Watched(model, watch)`, `watch` gets what each layer's attention compares.
"""

from ..upstream.attention import Watched, route

__all__ = ["Watched", "route"]
