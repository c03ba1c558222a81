"""Models of the type `softcapped`, which mlx-lm does not know."""

from mlx_provider import ModelFamily, hookimpl

mlx_provider_api = 1


def matches(config):
    """10: more than any family that takes what it can."""
    return 10 if config.get("model_type") == "softcapped" else 0


def load(folder, options):
    # here, since both import MLX: listing plugins must stay quick
    from mlx_provider.families.text import load_text

    from .model import Arguments, Model

    return load_text(folder, options, classes=lambda config: (Model, Arguments))


@hookimpl
def mlx_model_families():
    yield ModelFamily("softcapped", matches, load, serves="Models whose logits are capped")
