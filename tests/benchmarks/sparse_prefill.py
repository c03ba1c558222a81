"""What sparse prefill saves, and what it forgets.

(needle) a name that the user tells somewhere in a talk, and asks for at its end: answers that know
it, by the share of the prompt that is kept. Beside the draft model's choice stands one by chance,
which keeps as much; `rank` says how many of the chunks that may go matter more to the scorer than
the name's, 0: none, 1: all. The demo model was trained on short talks: past some hundred tokens it
forgets by itself, as its share of 1.0 shows, where the ends that are always kept are most of the
prompt. No figure of it is one of a larger model; give a checkpoint of your own. (prefill) seconds
until the first token, whole and in part, of random weights or the checkpoint. (curves) the same of
an 8B model that one of 0.6B scores, on the curves of devices, by the scheduler; no figure of it
depends on this machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_curves import (
    CHIPS,
    MODELS,
    Estimate,
    Model,
    Outcome,
    Thinned,
    simulate,
)
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.sparse_prefill.selection import CHUNK, chunk_scores, kept_anyway
from mlx_provider.engine.sparse_prefill.sparse_prefill import SparsePrefill
from mlx_provider.errors import MLXProviderError
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.records import LoadedModel, Prompt, ScoresPrompts
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_request
from mlx_provider_bench.engine import MODEL, sizes
from mlx_provider_bench.report import Result, print_rows, size_of, surroundings
from mlx_provider_bench.subjects.batching import server_engine
from mlx_provider_eval.haystack import NAMES, TOLD, talk

REPLY = 12
"""Tokens in which it is to be told."""
LEAST = 256
"""Tokens from which on a prompt is thinned out."""
LONG = 32_000
"""Tokens of a prompt on the curves."""
SCORER = Model(0.34e9, 0.9e9, key=114_688, heads=2, bandwidth=1.0, pair=0.23e6)
"""0.6B in 4 bit."""
SCORED = "dense 8B"


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what."""

    parts: Sequence[str] = ("needle", "prefill", "curves")
    shares: Sequence[float] = (1.0, 0.7, 0.5, 0.3, 0.2)
    """Of the prompt that is kept; 1: no sparse prefill."""
    lengths: Sequence[int] = (350,)
    """Tokens of the talks."""
    depths: Sequence[float] = (0.2, 0.4, 0.6)
    """Where in them the name is told."""
    names: int = 4
    """Talks of each length and depth."""
    prompt: int = 4096
    """Tokens of the prompt that is timed."""
    rounds: int = 3
    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"
    model: Path | None = None
    draft_model: Path | None = None


class Chance:
    """A scorer that knows nothing."""

    longest_scored = 2**30
    scored_token_bytes = 0

    def scoring(self, tokens: Sequence[int]) -> Chance:
        self._tokens = tokens
        return self

    def advance(self) -> NDArray[np.float32]:
        """Chunks in a random order, another one for each prompt."""
        dice = np.random.default_rng(sum(self._tokens))
        chunks = dice.random(-(-len(self._tokens) // 32)).astype(np.float32)
        return np.repeat(chunks, 32)[: len(self._tokens)]


@dataclass
class Setting:
    """A loaded model, and who scores its prompts."""

    plan: Plan
    model: LoadedModel
    found: Probe
    curve: Curve
    scorer: ScoresPrompts

    def first_token(
        self, prompt: Prompt, share: float, scorer: ScoresPrompts
    ) -> tuple[Request, Any]:
        """A request that has just its first token, and the engine that serves it."""
        sparse = SparsePrefill(scorer, share=share, least=LEAST)
        engine = server_engine(
            self.model,
            self.found,
            costs=Costs(self.curve),
            sparse_prefill=sparse if share < 1 else None,
        )
        stops = self.model.info.stop_tokens
        request = new_request(prompt.tokens, max_tokens=REPLY, stop_tokens=stops)
        request.prompt = prompt
        engine.submit(request)
        while request.first_token is None and not engine.idle:
            engine.step()
        return request, engine


def bench(plan: Plan) -> Result:
    """Run the named parts; JSON-able. A table of each goes to stderr."""
    result = surroundings(plan.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        for part in plan.parts:
            if part == "curves":
                rows = list(curves(plan))
            else:
                setting = _setting(plan, Path(scratch) / part, demo=part == "needle")
                result[f"{part}_model"] = size_of(setting.model)
                rows = list(PARTS[part](setting))
            result[part] = rows
            print_rows(part, TABLES[part], rows)
    return result


def _setting(plan: Plan, scratch: Path, *, demo: bool) -> Setting:
    folder, draft = plan.model, plan.draft_model
    if folder is None:
        folder, draft = _demo() if demo else _random(plan, scratch)
    model = load_model(folder, plan.dtype)
    found = probe(model, model.make_cache, model.kv_layouts)
    curve = calibrate(model, model.make_cache)
    options = ModelOptions(drafter="model", draft_model=str(draft))
    registry = PluginRegistry.discover()
    scorer = drafts_of(registry, folder, model, options).scorer
    if scorer is None:
        raise MLXProviderError(f"{draft} cannot score prompts for {folder}")
    return Setting(plan, model, found, curve, scorer)


def _demo() -> tuple[Path, Path]:
    """The trained model of the package, by itself: there is no smaller one."""
    import mlx_provider.demo

    folder = Path(mlx_provider.demo.__file__).parent / "model"
    return folder, folder


def _random(plan: Plan, scratch: Path) -> tuple[Path, Path]:
    """Of its draft model half the width and a third of the layers."""
    from mlx_provider.testing.tiny import build

    shape = MODEL | sizes(plan.hidden, plan.layers)
    small = MODEL | sizes(plan.hidden // 2, max(1, plan.layers // 3))
    return build(scratch / "model", "qwen3", **shape), build(scratch / "draft", "qwen3", **small)


# -- needle


def needle(setting: Setting) -> Iterator[Result]:
    """Answers that know the name, of all depths and names, by length and share."""
    plan = setting.plan
    for length in plan.lengths:
        talks = [
            (NAMES[seed], asked_after(setting.model, length, depth, seed))
            for depth in plan.depths
            for seed in range(plan.names)
        ]
        scorers: dict[str, ScoresPrompts] = {"draft model": setting.scorer, "chance": Chance()}
        ranks = {
            who: _mean([_rank(setting.model, scorer, *each) for each in talks])
            for who, scorer in scorers.items()
        }
        for share in plan.shares:
            for who, scorer in scorers.items() if share < 1 else [("whole", setting.scorer)]:
                known, kept = zip(
                    *(_knows(setting, prompt, share, scorer, name) for name, prompt in talks),
                    strict=True,
                )
                yield {
                    "length": length,
                    "share": share,
                    "chosen_by": who,
                    "kept": statistics.fmean(kept),
                    "known": f"{sum(known)}/{len(known)}",
                    "recall": sum(known) / len(known),
                    "rank": ranks.get(who),
                }


def asked_after(model: LoadedModel, length: int, depth: float, seed: int) -> Prompt:
    """The shortest talk of at least so many tokens, with a name at that share of its turns."""
    turns = 0
    while True:
        turns += 1
        messages = talk(turns, depth, seed, length)
        prompt = model.prepare(messages, tools=(), media=(), variables={})
        if len(prompt.tokens) >= length:
            return prompt


def _rank(model: LoadedModel, scorer: ScoresPrompts, name: str, prompt: Prompt) -> float | None:
    """Share of the chunks that may go which matter more than the one where the name is told."""
    told = model.tokenizer.encode(TOLD.format(name), special=False)
    tokens, count = list(prompt.tokens), len(prompt.tokens)
    at = next(i for i in range(count) if tokens[i : i + len(told)] == told) // CHUNK
    scoring, scores = scorer.scoring(tokens), None
    while scores is None:
        scores = scoring.advance()
    means, may_go = chunk_scores(scores, count), ~kept_anyway(count)
    others = int(may_go.sum()) - 1
    return int((means[may_go] > means[at]).sum()) / others if may_go[at] and others else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _knows(
    setting: Setting, prompt: Prompt, share: float, scorer: ScoresPrompts, name: str
) -> tuple[bool, int]:
    request, engine = setting.first_token(prompt, share, scorer)
    while not engine.idle:
        engine.step()
    text = setting.model.tokenizer.decode(request.rows[0].tokens)
    return name in text, len(prompt.tokens) - request.skipped


# -- prefill


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
            request, engine = setting.first_token(Prompt(tokens), share, setting.scorer)
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


# -- curves


def curves(plan: Plan) -> Iterator[Result]:
    """A long prompt alone and beside a stream, whole and in part."""
    from mlx_provider_drafters.prompt_scoring import passes

    for chip in CHIPS.values():
        device, scorer = Estimate(chip, MODELS[SCORED]), Estimate(chip, SCORER)
        name = next(each for each, own in CHIPS.items() if own is chip)
        for streams in (0, 1):
            whole = simulate(device, streams, prompt=LONG)
            for share in plan.shares:
                thinned = Thinned(scorer, passes(LONG), round(share * LONG)) if share < 1 else None
                found = simulate(device, streams, prompt=LONG, thinned=thinned)
                scoring = 0.0 if thinned is None else _scoring_seconds(thinned)
                yield _on_curve(name, streams, share, found, whole) | {"scoring": scoring}


def _scoring_seconds(thinned: Thinned) -> float:
    return sum(thinned.seconds(piece) for piece in range(len(thinned.pieces)))


def _on_curve(name: str, streams: int, share: float, found: Outcome, whole: Outcome) -> Result:
    return {
        "device": name,
        "streams": streams,
        "share": share,
        "seconds": LONG / found.rate,
        "faster": found.rate / whole.rate,
        "longest_gap": found.worst if streams else None,
    }


PARTS = {"needle": needle, "prefill": prefill}
TABLES = {
    "needle": {
        "tokens": "length",
        "share": "share",
        "chosen by": "chosen_by",
        "kept": "kept",
        "know the name": "known",
        "rank": "rank",
    },
    "prefill": {
        "tokens": "prompt",
        "share": "share",
        "kept": "kept",
        "seconds": "seconds",
        "times as fast": "faster",
    },
    "curves": {
        "device": "device",
        "streams": "streams",
        "share": "share",
        "seconds": "seconds",
        "of them scoring": "scoring",
        "times as fast": "faster",
        "longest gap": "longest_gap",
    },
}
