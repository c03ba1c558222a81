"""Sampling defaults of a model, if neither a request nor the model's files set them."""

from __future__ import annotations

from dataclasses import replace

from ..records import ModelFamily, ModelInfo, SamplingDefaults

ORDINARY = SamplingDefaults(temperature=0.7, top_p=0.95)
"""At temperature 1, small models answer nonsense."""


def with_sampling(info: ModelInfo, family: ModelFamily) -> ModelInfo:
    """The family's published values, else `ORDINARY`, with a note about the source."""
    if info.sampling != SamplingDefaults():
        return info
    published = family.sampling.get(info.model_type)
    found = published or ORDINARY
    by = f"family {family.name} uses the published" if published else "it uses the default"
    note = (
        f"the model's files set no sampling: {by} {_listed(found)}, unless a request sets its own"
    )
    return replace(info, sampling=found, notes=(*info.notes, note))


def _listed(found: SamplingDefaults) -> str:
    named = {name: value for name, value in vars(found).items() if value is not None}
    return ", ".join(f"{name} {value:g}" for name, value in named.items())
