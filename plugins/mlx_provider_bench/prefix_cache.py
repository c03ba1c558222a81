"""`mlx-provider bench prefix`: what a stored prefix saves. Time to first token of a long prompt
cold, repeated, and with another question at its end; a conversation of six turns over a document.
With the demo models, or one checkpoint; greedy tokens are compared with a cold run everywhere. The
engine is stepped in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlx_provider.commands import DEMOS, EngineSettings, folder_of, load_model
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.inputs import FeatureCache
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.scheduling.chunking import GRID
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.records import LoadedModel, Prompt
from mlx_provider.testing.driver import new_engine, new_request, output_of, picture, run

from .model_speed import WORDS
from .report import Result, against, print_rows, size_of, surroundings

WIDE = 2**50
"""A memory budget that never matters here."""
IMAGE_EDGE = 448
"""Pixels along an image's sides."""
REPLY = 6
TRIALS = 12
ALL_COLD = 4096
"""Prompt tokens up to which every kind of hit is checked against its own cold run."""
SPEEDUP_AT = 16_384
SPEEDUP_TARGET = 28.0
CONVERSATION_TARGET = 10.76
Report = Callable[[str], None]
_TTFT = {
    "model": "model",
    "tokens": "prompt_tokens",
    "cold s": "cold_seconds",
    "repeat s": "repeat_seconds",
    "cold/repeat": "cold_over_repeat",
    "cold/turn": "next_turn.cold_over_hit",
    "cold/other": "other_question.cold_over_hit",
    "other computed": "other_question.computed",
    "equal": "same_tokens",
}
_TALK = {"model": "model", "cold/cached": "cold_over_cached", "equal": "same_tokens"}


@dataclass(frozen=True)
class Plan:
    models: Sequence[str] = ("demo", "demo-hybrid", "demo+image")
    """Folders, or models of the package; `+image`: with an image before the document. The last one
    has the conversation."""
    sizes: Sequence[int] = (1024, 4096, SPEEDUP_AT)
    dtype: str | None = None
    """To which weights are expanded; unset: that of the checkpoint, float32 of the demo models."""
    document: int = 17_000
    """Tokens of the conversation's document."""
    turns: int = 6
    parts: Sequence[str] = ("ttft", "conversation")


@dataclass(frozen=True)
class Asked:
    document: str
    question: str
    image: int | None = None
    """Seed of an image before the document."""
    image_edge: int = IMAGE_EDGE
    turns: tuple[tuple[str, str], ...] = ()

    def asking(self, question: str) -> Asked:
        return replace(self, question=question)

    def followed_by(self, reply: str, question: str) -> Asked:
        return replace(self, question=question, turns=(*self.turns, (self.question, reply)))


def words_of(asked: Asked, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    opening: Any = asked.document
    if asked.image is not None:
        opening = [dict(image or {}), {"type": "text", "text": opening}]
    turns = [text for turn in asked.turns for text in turn]
    said = enumerate([opening, "I have read it.", *turns, asked.question])
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in said]


def document(model: LoadedModel, tokens: int, seed: int) -> str:
    dice = random.Random(seed)  # noqa: S311
    encode = model.tokenizer.encode
    per_word = len(encode(" ".join(WORDS), special=False)) / len(WORDS)
    # Not many more words than needed: a text beyond the model's context is refused.
    words = int(1.02 * tokens / per_word) + 16
    ids: Sequence[int] = encode(" ".join(dice.choice(WORDS) for _ in range(words)), special=False)
    return model.tokenizer.decode(ids[:tokens]).strip()


def server_engine(
    model: LoadedModel, found: Probe, *, costs: Costs | None = None, **more: Any
) -> Engine:
    """With the limits of a server, and memory without end; measures its passes unless `costs` are
    known."""
    s = EngineSettings()
    return new_engine(
        model,
        layout=found.layout,
        mixes=found.mixes,
        costs=costs or Costs(calibrate(model, model.make_cache, found).curve),
        grid=GRID if found.memory.recurrent else 1,
        max_chunk=s.max_chunk,
        max_rows=s.max_rows,
        reserve=s.output_reserve,
        available=lambda: WIDE,
        **more,
    )


@dataclass(frozen=True)
class Timed:
    """`first`: seconds until its first token."""

    first: float
    tokens: list[int]
    prompt_tokens: int
    cached: int


class Subject:
    """One model in two engines: without reuse, and with a prefix cache."""

    def __init__(self, model: LoadedModel, *, image: bool) -> None:
        self.model, self.image = model, image
        self.store = PrefixCache(budget=lambda: WIDE)
        found = probe(model, model.make_cache, model.kv_layouts)
        self.cold = server_engine(model, found, features=FeatureCache(0))
        features = FeatureCache(EngineSettings().feature_bytes)
        self.warm = server_engine(model, found, prefix_cache=self.store, features=features)
        hello = model.prepare(
            [{"role": "user", "content": "Hello"}], tools=[], media=[], variables={}
        )
        for engine in (self.cold, self.warm):
            self._run(engine, hello, 2)

    def ask(self, engine: Engine, asked: Asked) -> Timed:
        seed = asked.image
        media = [] if seed is None else [picture(seed, asked.image_edge)]
        said = words_of(asked, {"type": "image"})
        prompt = self.model.prepare(said, tools=[], media=media, variables={})
        return self._run(engine, prompt, REPLY)

    def _run(self, engine: Engine, prompt: Prompt, max_tokens: int) -> Timed:
        """Greedy; time starts when the engine has the tokens."""
        import mlx.core as mx

        request = new_request(prompt.tokens, max_tokens=max_tokens)
        request.prompt = prompt
        mx.synchronize()
        began = engine.clock()
        engine.submit(request)
        run(engine)
        first = (request.first_token or began) - began
        return Timed(first, output_of(request).tokens, len(prompt.tokens), request.cached)


def bench(plan: Plan, report: Report) -> Result:
    """JSON-able. `report` gets what is measured; tables go to stderr."""
    result = surroundings(plan.dtype or "of the checkpoint; float32 of the demo models")
    result |= {"models": {}, "ttft": [], "conversation": []}
    sizes = plan.sizes if "ttft" in plan.parts else ()
    total = len(plan.models) * len(sizes)
    for given in plan.models if sizes else plan.models[-1:]:
        path, _, image = given.partition("+")
        report(f"{given}: the model is loaded and tried")
        model = load_model(folder_of(path), plan.dtype or ("float32" if path in DEMOS else None))
        subject, name = Subject(model, image=bool(image)), Path(path).name
        result["models"][name] = size_of(model)
        for size in sizes:
            which = f"{len(result['ttft']) + 1} of {total}"
            report(f"{which}: {given}, prompts of {size:,} tokens: cold, then repeated")
            row = {"model": Path(given).name, **_first_tokens(subject, size)}
            result["ttft"].append(row)
            report(
                f"{which}: first token after {row['cold_seconds']:.3g} s cold, "
                f"{row['repeat_seconds']:.3g} s repeated; equal answers: {row['same_tokens']}"
            )
    if "conversation" in plan.parts:
        talk = _conversation(subject, plan, report)
        result["conversation"].append({"model": Path(given).name, **talk})
    print_rows("time to first token, in process", _TTFT, result["ttft"])
    print_rows("conversation", _TALK, result["conversation"])
    return result


def _first_tokens(subject: Subject, size: int) -> Result:
    """Cold, repeated, the next turn, and other questions about one document. Ratios compare
    medians: on a busy machine the fastest of a few says less. Of two cold runs the faster
    counts."""
    text = document(subject.model, size, seed=size)
    base = Asked(text, "Which colour is the circle?", image=size if subject.image else None)
    first = subject.ask(subject.warm, base)
    reply = subject.model.tokenizer.decode(first.tokens)
    questions = [f"And what is the weather {i} like in Paris today?" for i in range(TRIALS)]
    turn = [base.followed_by(reply, each) for each in questions]
    other = [base.asking(each) for each in questions]
    truth = subject.ask(subject.cold, turn[0])
    repeats, next_turn, another = (
        [subject.ask(subject.warm, each) for each in asked]
        for asked in ([base] * TRIALS, turn, other)
    )
    cold = min(first.first, truth.first)
    repeat = median(one.first for one in repeats)
    checked = [*((one, first) for one in repeats), (next_turn[0], truth)]
    if size <= ALL_COLD:  # a third cold run of a longer prompt would cost too much
        checked.append((another[0], subject.ask(subject.cold, other[0])))
    return {
        "prompt_tokens": first.prompt_tokens,
        "cold_seconds": cold,
        "repeat_seconds": repeat,
        "repeat_cached": repeats[0].cached,
        "cold_over_repeat": _speedup(cold / repeat, first.prompt_tokens),
        "next_turn": _hit(next_turn, cold),
        "other_question": _hit(another, cold),
        "same_tokens": f"{sum(a.tokens == b.tokens for a, b in checked)}/{len(checked)}",
    }


def _hit(runs: Sequence[Timed], cold: float) -> Result:
    first, size = median(one.first for one in runs), runs[0].prompt_tokens
    return {
        "cached": runs[0].cached,
        "computed": size - runs[0].cached,
        "seconds": first,
        "cold_over_hit": _speedup(cold / first, size),
    }


def _speedup(ratio: float, tokens: int) -> object:
    if tokens < SPEEDUP_AT:
        return round(ratio, 2)
    return against(ratio, SPEEDUP_TARGET, at_least=True)


def _conversation(subject: Subject, plan: Plan, report: Report) -> Result:
    asked = Asked(
        document(subject.model, plan.document, seed=3),
        "Which colour is the circle?",
        image=3 if subject.image else None,
    )
    turns = []
    for turn in range(plan.turns):
        report(f"conversation: turn {turn + 1} of {plan.turns}")
        cached, cold = (subject.ask(side, asked) for side in (subject.warm, subject.cold))
        turns.append((cached, cold))
        report(f"first token after {cold.first:.3g} s cold, {cached.first:.3g} s with the cache")
        reply = subject.model.tokenizer.decode(cold.tokens)
        asked = asked.followed_by(reply, f"And what about the square, in turn {turn + 2}?")
    later = turns[1:]
    gain = sum(cold.first for _, cold in later) / sum(cached.first for cached, _ in later)
    return {
        "prompt_tokens": [cached.prompt_tokens for cached, _ in turns],
        "cached_tokens": [cached.cached for cached, _ in turns],
        "cached_seconds": [cached.first for cached, _ in turns],
        "cold_seconds": [cold.first for _, cold in turns],
        "cold_over_cached": against(gain, CONVERSATION_TARGET, at_least=True),
        "same_tokens": f"{sum(a.tokens == b.tokens for a, b in turns)}/{len(turns)}",
    }
