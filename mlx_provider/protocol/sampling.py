"""How tokens are drawn: the one declaration of names and bounds.

The LiteLLM handler takes its names from here, and the engine's `SamplingParams` names the neutral
values and draws by them. A value that a model's files may name stands in `SamplingDefaults`, too.
"""

from __future__ import annotations

from pydantic import ConfigDict, Field

from ..bounds import TokenBias
from .wire_model import Asked


class Sampling(Asked):
    """How tokens are drawn. `None` means: the model's default, else the neutral value."""

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
