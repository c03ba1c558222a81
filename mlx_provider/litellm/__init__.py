"""The LiteLLM provider, `custom_handler: mlx_provider.litellm.handler`; importing registers it."""

from .patches import register
from .provider import Provider

handler = Provider()
register(handler)

__all__ = ["Provider", "handler"]
