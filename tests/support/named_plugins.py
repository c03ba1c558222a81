from mlx_provider.registry import PluginRegistry


def discover(*names: str) -> PluginRegistry:
    """These plugins alone: what else is installed on this machine does not matter."""
    return PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ",".join(names)})
