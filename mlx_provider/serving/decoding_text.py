"""How the rows of a model decode, in words."""

from __future__ import annotations

from ..protocol.health import FixedPasses, ModelStatus


def decoding(model: ModelStatus) -> str:
    """How its rows decode, as the engine says."""
    if model.reproducible is not None:
        return fixed_passes(model.reproducible)
    return batching(model.kv_layout, model.mixed_prefill, model.noise_floor)


def fixed_passes(passes: FixedPasses) -> str:
    """What a reproducible model costs."""
    rows = (
        f"rows decode {passes.rows} to a pass, filled up ({passes.cost:.1f} times the time of one)"
        if passes.rows > 1
        else "each row decodes in a pass of its own"
    )
    return f"reproducible: {rows}, prompts run in passes of {passes.tokens} tokens"


def batching(layout: str, mixed_prefill: bool, noise_floor: float) -> str:
    """How rows of a model decode together."""
    if layout == "solo":
        return "rows decode alone"
    chunks = "with" if mixed_prefill else "apart from"
    return (
        f"rows decode together ({layout}), {chunks} chunks of prompts, "
        f"log-probabilities within {noise_floor:.2g} of alone"
    )
