"""What sparse prefill saves of the time to the first token; `mlx-provider eval needle` says what it
forgets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batching_subjects import server_engine, size_of
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.sparse_prefill import SparsePrefill
from mlx_provider.errors import MLXProviderError
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.records import LoadedModel, Prompt, ScoresPrompts
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_request
from mlx_provider_bench.report import Result, print_rows, surroundings

REPLY = 12
LEAST = 256
"""Tokens from which on a prompt is thinned out."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what."""

    model: Path
    draft_model: Path
    shares: Sequence[float] = (1.0, 0.7, 0.5, 0.3, 0.2)
    """Of the prompt that is kept; 1: no sparse prefill."""
    prompt: int = 4096
    """Tokens of the prompt that is timed."""
    rounds: int = 3
    dtype: str = "float32"


@dataclass
class Setting:
    """A loaded model, and who scores its prompts."""

    plan: Plan
    model: LoadedModel
    found: Probe
    curve: Curve
    scorer: ScoresPrompts

    def first_token(self, prompt: Prompt, share: float) -> tuple[Request, Any]:
        """A request that has just its first token, and the engine that serves it."""
        sparse = SparsePrefill(self.scorer, share=share, least=LEAST)
        engine = server_engine(
            self.model,
            self.found,
            costs=Costs(self.curve),
            sparse_prefill=sparse if share < 1 else None,
        )
        request = new_request(prompt.tokens, max_tokens=REPLY)
        engine.submit(request)
        while request.first_token is None and not engine.idle:
            engine.step()
        return request, engine


def bench(plan: Plan) -> Result:
    """JSON-able. A table goes to stderr."""
    setting = _setting(plan)
    rows = list(prefill(setting))
    print_rows("prefill", TABLE, rows)
    return surroundings(plan.dtype) | {"model": size_of(setting.model), "prefill": rows}


def _setting(plan: Plan) -> Setting:
    model = load_model(plan.model, plan.dtype)
    found = probe(model, model.make_cache, model.kv_layouts)
    curve = calibrate(model, model.make_cache, found).curve
    options = ModelOptions(drafter="model", draft_model=str(plan.draft_model))
    scorer = drafts_of(PluginRegistry.discover(), plan.model, model, options).scorer
    if scorer is None:
        raise MLXProviderError(f"{plan.draft_model} cannot score prompts for {plan.model}")
    return Setting(plan, model, found, curve, scorer)


def prefill(setting: Setting) -> Iterator[Result]:
    """Seconds until the first token; the shares take turns."""
    plan = setting.plan
    dice = np.random.default_rng(0)
    tokens = dice.integers(1, setting.model.info.vocab_size, plan.prompt).tolist()
    shares = [1.0, *(share for share in plan.shares if share < 1)]
    seconds: dict[float, list[float]] = {share: [] for share in shares}
    kept = dict.fromkeys(shares, plan.prompt)
    for turn in range(1 + plan.rounds):
        for share in shares:
            began = time.perf_counter()
            request, engine = setting.first_token(Prompt(tokens), share)
            if turn:
                seconds[share].append(time.perf_counter() - began)
            kept[share] = plan.prompt - request.skipped
            engine.cancel(request)
    for share in shares:
        ratios = [a / b for a, b in zip(seconds[1.0], seconds[share], strict=True)]
        yield {
            "prompt": plan.prompt,
            "share": share,
            "kept": kept[share],
            "seconds": statistics.median(seconds[share]),
            "faster": statistics.median(ratios),
        }


TABLE = {
    "tokens": "prompt",
    "share": "share",
    "kept": "kept",
    "seconds": "seconds",
    "times as fast": "faster",
}
