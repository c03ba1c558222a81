"""Tokens a pass with each drafter alone and with all of them, on a model with a trained head.

A story is told by the model itself, which its head can guess. A file is written again with few
changes, word by word as a grammar dictates, which only lookup can guess. The policy reckons with
the curve of a device and no clock runs, so that no figure depends on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx_provider
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.probe import probe
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.records import LoadedModel
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_request
from mlx_provider_bench.prefix_cache import server_engine
from mlx_provider_bench.report import Result
from speculation_curves import DEVICES

HYBRID = Path(mlx_provider.__file__).parent / "demo" / "hybrid"
DEVICE = "M3 Max, dense 8B"
DRAFTERS = ("off", "mtp", "lookup", "auto")
STORIES = ("the sea", "a fox", "two friends")
TEXTS = {"story": (3, 0), "rewrite": (0, 1), "both in one batch": (2, 1)}
"""How many rows tell a story, and how many write a file again."""


def compared(folder: Path | None, reply: int, source: str) -> Iterator[Result]:
    """One line for each text and drafter. `reply`: tokens of each row; `source`: the file."""
    folder = folder or HYBRID
    model = load_model(folder, "float32")
    found = probe(model, model.make_cache, model.kv_layouts)
    registry = PluginRegistry.discover()
    for text, (told, written) in TEXTS.items():
        plain: list[list[int]] = []
        for name in DRAFTERS:
            speculation = drafts_of(registry, folder, model, ModelOptions(drafter=name)).speculation
            if speculation is not None:
                speculation.clock = _still
            costs = Costs(DEVICES[DEVICE].measured())
            engine = server_engine(model, found, costs=costs, speculation=speculation, clock=_still)
            requests = [*_stories(model, told, reply), *_rewritten(model, written, reply, source)]
            for request in requests:
                engine.submit(request)
            while not engine.idle:
                engine.step()
            tokens = [request.rows[0].tokens for request in requests]
            plain = plain or tokens
            yield {
                "text": text,
                "drafter": name,
                "per_pass": round(sum(map(_per_pass, requests)) / len(requests), 2),
                "held": _held(requests),
                "same_tokens": tokens == plain,
            }


def _still() -> float:
    return 0.0


def _stories(model: LoadedModel, count: int, reply: int) -> list[Request]:
    made = []
    for topic in STORIES[:count]:
        asked = [{"role": "user", "content": f"Tell me a story. {topic}"}]
        prompt = model.prepare(asked, tools=[], media=[], variables={})
        made.append(new_request(prompt.tokens, max_tokens=reply))
    return made


def _rewritten(model: LoadedModel, count: int, reply: int, source: str) -> list[Request]:
    from speculation import Dictated, edited

    vocab = model.info.vocab_size
    text = model.tokenizer.encode(source, special=False)[:reply]
    made = []
    for _ in range(count):
        request = new_request(text, max_tokens=len(text))
        request.rows[0].constraint = Dictated(edited(text, vocab), vocab)
        made.append(request)
    return made


def _per_pass(request: Request) -> float:
    tokens = len(request.rows[0].tokens) - 1
    return tokens / (tokens - request.accepted)


def _held(requests: list[Request]) -> float | None:
    drafted = sum(request.drafted for request in requests)
    return round(sum(request.accepted for request in requests) / drafted, 2) if drafted else None
