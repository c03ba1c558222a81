"""Sampling defaults of a request: from the model's files, from its family, or general ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_provider import ModelFamily, ModelInfo, SamplingDefaults
from mlx_provider.families.checkpoint import sampling_defaults
from mlx_provider.protocol.requests import Sampling
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.loader import DEFAULT_SAMPLING, with_sampling

INFO = ModelInfo("known", 100, 100, frozenset(), "", 1, "low")
PUBLISHED = SamplingDefaults(temperature=0.6, top_k=20)


def family(**published: SamplingDefaults) -> ModelFamily:
    def load(folder: Path, options: object) -> Any:
        raise NotImplementedError

    return ModelFamily("f", lambda config: 1, load, sampling=published)


def test_the_files_have_precedence_then_the_family_then_general_defaults() -> None:
    named = replace(INFO, sampling=SamplingDefaults(top_p=0.5))
    assert with_sampling(named, family(known=PUBLISHED)) is named
    by_family = with_sampling(INFO, family(known=PUBLISHED))
    assert by_family.sampling == PUBLISHED
    assert "published temperature 0.6, top_k 20" in by_family.notes[-1]
    usual = with_sampling(INFO, family(other=PUBLISHED))
    assert (usual.sampling, len(usual.notes)) == (DEFAULT_SAMPLING, 1)
    assert "temperature 0.7, top_p 0.95" in usual.notes[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": 3}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": True}, SamplingDefaults(temperature=1.0)),
        ({"top_k": 64}, SamplingDefaults(temperature=1.0, top_k=64)),
        ({"temperature": 0.3}, SamplingDefaults(temperature=0.3)),
    ],
)
def test_a_file_with_some_parameters_does_not_change_the_others(
    content: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert sampling_defaults(content) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("qwen3", Sampling(temperature=0.6, top_p=0.95, top_k=20)),
     ("llama", Sampling(temperature=0.7, top_p=0.95))],
)  # fmt: skip
def test_defaults_of_the_model_fill_sampling(tiny: Any, kind: str, expected: Sampling) -> None:
    """Defaults act like equal values in the request, which have precedence."""
    model = tiny(kind)

    def texts(sampling: Sampling) -> list[str]:
        seeded = [sampling.model_copy(update={"seed": seed}) for seed in range(4)]
        return [model.ask(sampling=each, max_tokens=12).only.content for each in seeded]

    default = texts(Sampling())
    assert default == texts(expected)
    assert default != texts(Sampling(temperature=1.0, top_p=1.0, top_k=0))
    (note,) = (each for each in model.served().status.notes if "sampling" in each)
    assert f"temperature {expected.temperature}" in note


def test_the_defaults_of_our_families_are_valid() -> None:
    families = PluginRegistry.discover().model_families.values()
    named = [each for one in families for each in one.sampling.values()]
    assert named
    assert all(0 < each.temperature <= 2 for each in named if each.temperature is not None)
