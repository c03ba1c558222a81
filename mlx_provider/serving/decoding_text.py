"""Describes how the rows of a model decode."""

from __future__ import annotations

from ..engine.scheduling.chunking import Chunking
from ..protocol.health import FixedPasses, ModelStatus

STREAMS, HELD, DEPTH = 4, 8_000, 16_000
"""Streams, tokens of each, and depth of a prompt beside them."""


def decoding(model: ModelStatus) -> str:
    if model.reproducible is not None:
        return fixed_passes(model.reproducible)
    return batching(model.kv_layout, model.mixed_prefill, model.noise_floor)


def fixed_passes(passes: FixedPasses) -> str:
    rows = (
        f"rows decode {passes.rows} to a pass, filled up ({passes.cost:.1f} times the time of one)"
        if passes.rows > 1
        else "each row decodes in a pass of its own"
    )
    return f"reproducible: {rows}, prompts run in passes of {passes.tokens} tokens"


def batching(layout: str, mixed_prefill: bool, noise_floor: float) -> str:
    if layout == "solo":
        return "rows decode alone"
    chunks = "with" if mixed_prefill else "apart from"
    return (
        f"rows decode together ({layout}), {chunks} chunks of prompts, "
        f"log-probabilities within {noise_floor:.2g} of alone"
    )


def beside_a_prompt(chunking: Chunking) -> str:
    found = chunking.expected_pace(STREAMS, HELD, DEPTH)
    return (
        f"while a prompt of {DEPTH:,} tokens is computed, {STREAMS} running streams get a token "
        f"every {found.average:.2g} s (otherwise {found.alone:.2g} s, at most {found.longest:.2g} "
        f"s), and the prompt is computed at {found.share:.0%} of its full speed; "
        f"MLX_PROVIDER_STALL_TARGET={chunking.limits.stall_target:g} sets the balance"
    )
