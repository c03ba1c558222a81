"""Data from a model's folder, before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import MLXProviderError
from ..families.checkpoint import named_context, named_template, read_json
from ..registry import PluginRegistry
from .hub import local_folder

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Without one of these files, a checkpoint cannot accept images."""


@dataclass(frozen=True)
class ModelFacts:
    """`None`: unknown."""

    context_length: int | None = None
    vision: bool | None = None
    reasoning: bool | None = None


def facts_of(model: str, registry: Callable[[], PluginRegistry]) -> ModelFacts:
    try:
        folder = local_folder(model)
        if folder is None:
            return ModelFacts()
        config = read_json(folder / "config.json")
        template = named_template(folder)
    except MLXProviderError:
        return ModelFacts()
    return ModelFacts(
        context_length=named_context(config.get("text_config") or config),
        vision="vision_config" in config and any((folder / name).is_file() for name in PROCESSORS),
        reasoning=registry().detect_reasoning_parser(template) is not None,
    )
