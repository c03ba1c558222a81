"""The LiteLLM provider: `custom_handler: mlx_provider.litellm.handler`. The import registers it, so
in a script `import mlx_provider.litellm` and `litellm.completion(model="mlx/demo", ...)` are
enough."""

from .patches import register
from .provider import Provider

handler = Provider()
register(handler)

__all__ = ["Provider", "handler"]
