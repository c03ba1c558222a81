"""`restart`: what an agent's next turn computes after the engine has started anew. No clock.

The prefix cache, its policy and its disk tier are the real ones; rows hold tiny arrays that follow
from the tokens. `between` are the most bytes that an 8B model with 36 layers of 8 heads of 128
floats in 16 bits has copied into a row between two steps of other requests.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent_traffic import SyntheticModel
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import EDGE, DiskTier
from schedules import Calls
from small_budgets import KINDS, TOKEN_BYTES, Kind, Server, sessions

TOKEN_BYTES_8B = 36 * 2 * 8 * 128 * 2
FOLDER_BYTES = 2**33


@dataclass(frozen=True)
class Restarted:
    """The first turn of a session on a new engine."""

    layers: str
    budget: int
    """Of the memory, in tokens."""
    prompt: int
    cached: int
    computed: int
    share: float
    files: int
    between: int


def restarted(layers: Kind, budget: int, *, start: int) -> Restarted:
    """Serve a turn, start anew, and serve the next."""
    (turns,) = sessions(1, start=start, turns=2)
    model, limit, calls = SyntheticModel(layers), budget * TOKEN_BYTES[layers], Calls()
    with tempfile.TemporaryDirectory() as folder:
        for turn in turns:
            disk = DiskTier(Path(folder), FOLDER_BYTES, calls)
            cache = PrefixCache(budget=lambda: limit, disk=disk)
            request = Server(cache, model, calls=calls).serve(turn)
            cache.close()
        files = len(list(Path(folder).rglob("*.safetensors")))
    prompt = len(turns[1].prompt)
    return Restarted(
        layers, budget, prompt, request.cached_tokens, request.prefilled_tokens,
        round(request.prefilled_tokens / prompt, 4), files, EDGE * TOKEN_BYTES_8B,
    )  # fmt: skip


def run(*, start: int = 60_000) -> list[Restarted]:
    """An agent of 60,000 tokens on memory for 20,000, and for all of them."""
    return [
        restarted(layers, budget, start=start) for layers in KINDS for budget in (20_000, 80_000)
    ]
