"""`mlx-provider bench prefix`: what a stored prefix saves. Time to first token of a long prompt
cold, repeated, and with another question at its end; a conversation of six turns over a document.
With the demo models, or one checkpoint; greedy tokens are compared with a cold run everywhere. The
engine is stepped in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mlx_provider.commands import EngineSettings, folder_of, load_model
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.inputs import FeatureCache
from mlx_provider.engine.memory import arrays
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids, key_tokens
from mlx_provider.engine.scheduling.chunking import GRID
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.records import LoadedModel, MediaItem, PrefillChunk, Prompt
from mlx_provider.testing.driver import TokenOutput, new_engine, new_request, picture

from .model_speed import WORDS
from .report import Result, against, print_rows, size_of, surroundings

Messages = Sequence[Mapping[str, Any]]
WIDE = 2**50
"""A memory budget that never matters here."""
VARIANTS = ("demo", "demo-hybrid", "demo+image")
IMAGE_EDGE = 448
"""Pixels along an image's sides."""
PARTS = ("ttft", "conversation")
REPLY = 6
TRIALS = 12
ALL_COLD = 4096
"""Prompt tokens up to which every kind of hit is checked against its own cold run."""
SPEEDUP_AT = 16_384
SPEEDUP_TARGET = 28.0
SUFFIX_TARGET = 1.3
CONVERSATION_TARGET = 10.76
Report = Callable[[str], None]
_TTFT = {
    "variant": "variant",
    "tokens": "prompt_tokens",
    "cold s": "cold_seconds",
    "repeat s": "repeat_seconds",
    "cold/repeat": "cold_over_repeat",
    "cold/turn": "next_turn.cold_over_hit",
    "turn/suffix": "next_turn.over_suffix",
    "cold/other": "other_question.cold_over_hit",
    "other/suffix": "other_question.over_suffix",
    "other computed": "other_question.computed",
    "same message": "same_message.reused",
    "equal": "same_tokens",
}
_TALK = {"variant": "variant", "cold/cached": "cold_over_cached", "equal": "same_tokens"}


@dataclass(frozen=True)
class Plan:
    variants: Sequence[str] = VARIANTS
    """Models of the package; `+image`: with an image before the document."""
    model: Path | None = None
    """A checkpoint's folder, in place of them."""
    sizes: Sequence[int] = (1024, 4096, SPEEDUP_AT)
    dtype: str | None = None
    """To which weights are expanded; unset: that of the checkpoint, float32 of the demo models."""
    talk: Sequence[str] = ("demo+image",)
    talk_document: int = 17_000
    turns: int = 6
    parts: Sequence[str] = PARTS


@dataclass(frozen=True)
class Asked:
    document: str
    question: str
    image: int | None = None
    """Seed of an image before the document."""
    image_edge: int = IMAGE_EDGE
    turns: tuple[tuple[str, str], ...] = ()
    joined: bool = False
    """The question ends the document's own message; there are no turns."""

    def asking(self, question: str) -> Asked:
        return replace(self, question=question)

    def followed_by(self, reply: str, question: str) -> Asked:
        return replace(self, question=question, turns=(*self.turns, (self.question, reply)))


def words_of(asked: Asked, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    text = f"{asked.document}\n{asked.question}" if asked.joined else asked.document
    opening: Any = text
    if asked.image is not None:
        opening = [dict(image or {}), {"type": "text", "text": text}]
    if asked.joined:
        return [{"role": "user", "content": opening}]
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": "I have read it."},
    ]
    for question, reply in asked.turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return [*messages, {"role": "user", "content": asked.question}]


def document(model: LoadedModel, tokens: int, seed: int) -> str:
    dice = random.Random(seed)  # noqa: S311
    encode = model.tokenizer.encode
    per_word = len(encode(" ".join(WORDS), special=False)) / len(WORDS)
    # Not many more words than needed: a text beyond the model's context is refused.
    words = int(1.02 * tokens / per_word) + 16
    ids: Sequence[int] = encode(" ".join(dice.choice(WORDS) for _ in range(words)), special=False)
    return model.tokenizer.decode(ids[:tokens]).strip()


@dataclass(eq=False)
class Job:
    """Times in seconds of one clock."""

    prompt: list[int]
    max_tokens: int
    arrives: float = 0.0
    after: int = 0
    """Tokens that every job before it must have when it arrives."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    submitted: float = 0.0

    @property
    def first_token(self) -> float:
        return self.times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class TimedOutput(TokenOutput):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def push(self, token: int, logprob: Any = None) -> list[Any]:
        self.job.tokens.append(token)
        self.job.times.append(time.perf_counter())
        return []


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


class InProcess:
    def __init__(self, model: LoadedModel, probe: Probe, *, reuse: bool) -> None:
        self.model = model
        self._store = PrefixCache(budget=lambda: WIDE)
        features = EngineSettings().feature_bytes if reuse else 0
        self._engine = server_engine(
            model,
            probe,
            prefix_cache=self._store if reuse else None,
            features=FeatureCache(features),
        )

    def prompt(self, messages: Messages, media: Sequence[MediaItem]) -> Prompt:
        return self.model.prepare(messages, tools=[], media=media, variables={})

    def ask(self, prompt: Prompt, max_tokens: int) -> Timed:
        """Greedy; time starts when the engine has the tokens."""
        import mlx.core as mx

        job = Job(list(prompt.tokens), max_tokens)
        request = new_request(prompt.tokens, max_tokens=max_tokens)
        request.prompt = prompt
        request.rows[0].output = TimedOutput(job)
        mx.synchronize()
        began = time.perf_counter()
        self._engine.submit(request)
        while not self._engine.idle:
            self._engine.step()
        return Timed(job.times[0] - began, job.tokens, len(prompt.tokens), request.cached)

    def suffix_alone(self, prompt: Prompt) -> tuple[float, float]:
        """Seconds of model time for the uncached tokens of a prompt: in one call, and with the last
        token in a call of its own."""
        return self._prefill_seconds(prompt, False), self._prefill_seconds(prompt, True)

    def _prefill_seconds(self, prompt: Prompt, apart: bool) -> float:
        import mlx.core as mx

        end = len(prompt.tokens)
        key = CacheKey(self.model.info.fingerprint, "")
        match = self._store.match(key, as_ids(key_tokens(prompt)), limit=end - 1)
        cache, _ = self._store.acquire(match, self.model.make_cache, room=end - match.length)
        features = {
            span.content_hash: self.model.embed(span)
            for span in prompt.spans
            if span.end > match.length
        }
        chunk = partial(PrefillChunk, prompt, cache=cache, features=features)
        mx.eval(arrays(cache))
        began = time.perf_counter()
        start = match.length
        if apart and end - start > 1:
            self.model.prefill(chunk(start=start, stop=end - 1))
            mx.eval(arrays(cache))
            start = end - 1
        mx.eval(mx.argmax(self.model.prefill(chunk(start=start, stop=end))))
        return time.perf_counter() - began


@dataclass
class Subject:
    model: LoadedModel
    image: bool
    cold: InProcess = field(init=False)
    warm: InProcess = field(init=False)

    def __post_init__(self) -> None:
        found = probe(self.model, self.model.make_cache, self.model.kv_layouts)
        self.cold = InProcess(self.model, found, reuse=False)
        self.warm = InProcess(self.model, found, reuse=True)
        for side in (self.cold, self.warm):
            side.ask(side.prompt([{"role": "user", "content": "Hello"}], []), 2)

    def ask(self, side: InProcess, asked: Asked, max_tokens: int = REPLY) -> Timed:
        return side.ask(self.prompt(asked), max_tokens)

    def prompt(self, asked: Asked) -> Any:
        return self.warm.prompt(words_of(asked, {"type": "image"}), self.media(asked))

    def media(self, asked: Asked) -> list[MediaItem]:
        if asked.image is None:
            return []
        return [picture(asked.image, asked.image_edge)]


def bench(plan: Plan, report: Report) -> Result:
    """JSON-able. `report` gets what is measured; tables go to stderr."""
    own = "float32" if plan.model is None else "of the checkpoint"
    result = surroundings(plan.dtype or own) | _models(plan, report)
    _print(result)
    return result


def _models(plan: Plan, report: Report) -> Result:
    found: Result = {"models": {}, "ttft": [], "conversation": []}
    known = VARIANTS if plan.model is None else (plan.model.name,)
    lengths = [(v, size) for v in plan.variants for size in plan.sizes if "ttft" in plan.parts]
    for variant in (v for v in known if v in {*plan.variants, *plan.talk}):
        name, _, image = variant.partition("+")
        report(f"{variant}: the model is loaded and tried")
        dtype = plan.dtype or ("float32" if plan.model is None else None)
        model = load_model(plan.model or folder_of(name), dtype)
        subject = Subject(model, bool(image))
        found["models"][name] = size_of(model)
        for size in (size for v, size in lengths if v == variant):
            which = f"{len(found['ttft']) + 1} of {len(lengths)}"
            report(f"{which}: {variant}, prompts of {size:,} tokens: cold, then repeated")
            row = _first_tokens(subject, variant, size)
            found["ttft"].append(row)
            report(
                f"{which}: first token after {row['cold_seconds']:.3g} s cold, "
                f"{row['repeat_seconds']:.3g} s repeated; equal answers: {row['same_tokens']}"
            )
        if "conversation" in plan.parts and variant in plan.talk:
            found["conversation"].append(_conversation(subject, variant, plan, report))
    return found


def _first_tokens(subject: Subject, variant: str, size: int) -> Result:
    """Cold, repeated, the next turn, and other questions about one document. Ratios compare
    medians: on a busy machine the fastest of a few says less. Of two cold runs the faster
    counts."""
    text = document(subject.model, size, seed=size)
    base = Asked(text, "Which colour is the circle?", image=size if subject.image else None)
    first = subject.ask(subject.warm, base)
    reply = subject.model.tokenizer.decode(first.tokens)
    questions = [f"And what is the weather {i} like in Paris today?" for i in range(2 * TRIALS)]
    turn = [base.followed_by(reply, each) for each in questions]
    other = [base.asking(each) for each in questions]
    truth = subject.ask(subject.cold, turn[0])
    # A third cold run of a long prompt would cost too much.
    truth_other = subject.ask(subject.cold, other[0]) if size <= ALL_COLD else None
    repeats = [subject.ask(subject.warm, base) for _ in range(TRIALS)]
    next_turn = _hits(subject, turn)
    another = _hits(subject, other)
    cold = min(first.first, truth.first)
    repeat = median(one.first for one in repeats)
    inside = _same_message(subject, size)
    checked = [*((one, first) for one in repeats), (next_turn[0][0], truth), *inside[1]]
    checked += [] if truth_other is None else [(another[0][0], truth_other)]
    return {
        "variant": variant,
        "prompt_tokens": first.prompt_tokens,
        "cold_seconds": cold,
        "repeat_seconds": repeat,
        "repeat_cached": repeats[0].cached,
        "cold_over_repeat": _speedup(cold / repeat, first.prompt_tokens),
        "next_turn": _hit(next_turn, cold),
        "other_question": _hit(another, cold),
        "same_message": inside[0],
        "same_tokens": f"{sum(a.tokens == b.tokens for a, b in checked)}/{len(checked)}",
    }


def _same_message(subject: Subject, size: int) -> tuple[Result, list[tuple[Timed, Timed]]]:
    """Three questions, each at the end of one document's message; the last, and its cold run."""
    base = Asked(
        document(subject.model, size, seed=size + 1),
        "Which colour is the circle?",
        image=size + 1 if subject.image else None,
        joined=True,
    )
    asked = [base, base.asking("Is it raining in Paris?"), base.asking("How many squares?")]
    first, second, third = (subject.ask(subject.warm, each) for each in asked)
    row: Result = {
        "seconds": [one.first for one in (first, second, third)],
        "reused": [round(one.cached / one.prompt_tokens, 3) for one in (first, second, third)],
        "cold_over_hit": round(first.first / third.first, 2),
    }
    if size > ALL_COLD:
        return row, []
    return row, [(third, subject.ask(subject.cold, asked[2]))]


Hits = tuple[Sequence[Timed], Sequence[tuple[float, float]]]


def _hits(subject: Subject, asked: Sequence[Asked]) -> Hits:
    """Half of the questions as requests; of the others, the cost of their own tokens alone (none
    where little was reused)."""
    runs: list[Timed] = []
    alone: list[tuple[float, float]] = []
    for one, other in zip(asked[::2], asked[1::2], strict=True):  # in turn: the machine drifts
        runs.append(subject.ask(subject.warm, one))
        if runs[0].cached >= runs[0].prompt_tokens // 2:
            alone.append(subject.warm.suffix_alone(subject.prompt(other)))
    return runs, alone


def _hit(hits: Hits, cold: float) -> Result:
    runs, alone = hits
    first = median(one.first for one in runs)
    row: Result = {
        "cached": runs[0].cached,
        "computed": runs[0].prompt_tokens - runs[0].cached,
        "seconds": first,
        "cold_over_hit": _speedup(cold / first, runs[0].prompt_tokens),
    }
    if alone:
        # Of two ways the one that is usually faster, not the luckier one of each pair.
        own = min(median(way) for way in zip(*alone, strict=True))
        row["suffix_alone_seconds"] = own
        row["over_suffix"] = against(first / own, SUFFIX_TARGET, at_least=False)
    return row


def _speedup(ratio: float, tokens: int) -> object:
    if tokens < SPEEDUP_AT:
        return round(ratio, 2)
    return against(ratio, SPEEDUP_TARGET, at_least=True)


def _conversation(subject: Subject, variant: str, plan: Plan, report: Report) -> Result:
    asked = Asked(
        document(subject.model, plan.talk_document, seed=3),
        "Which colour is the circle?",
        image=3 if subject.image else None,
    )
    turns = []
    for turn in range(plan.turns):
        report(f"conversation of {variant}: turn {turn + 1} of {plan.turns}")
        cached, cold = (subject.ask(side, asked) for side in (subject.warm, subject.cold))
        turns.append((cached, cold))
        report(f"first token after {cold.first:.3g} s cold, {cached.first:.3g} s with the cache")
        reply = subject.model.tokenizer.decode(cold.tokens)
        asked = asked.followed_by(reply, f"And what about the square, in turn {turn + 2}?")
    later = turns[1:]
    gain = sum(cold.first for _, cold in later) / sum(cached.first for cached, _ in later)
    return {
        "variant": variant,
        "prompt_tokens": [cached.prompt_tokens for cached, _ in turns],
        "cached_tokens": [cached.cached for cached, _ in turns],
        "cached_seconds": [cached.first for cached, _ in turns],
        "cold_seconds": [cold.first for _, cold in turns],
        "cold_over_cached": against(gain, CONVERSATION_TARGET, at_least=True),
        "same_tokens": f"{sum(a.tokens == b.tokens for a, b in turns)}/{len(turns)}",
    }


def _print(result: Mapping[str, Any]) -> None:
    print_rows("time to first token, in process", _TTFT, result.get("ttft", []))
    print_rows("conversation", _TALK, result.get("conversation", []))
