"""Sampling parameters: the only declaration of their names and bounds.

The LiteLLM handler uses these names. `SamplingParams` has the neutral values, `SamplingDefaults`
what a model's files can set."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from ..bounds import TokenBias
from .wire_model import Asked


class Sampling(Asked):
    """`None`: the model's default, or the neutral value."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: TokenBias = Field(default_factory=dict)
