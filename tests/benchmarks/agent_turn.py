"""From a tool's result to the next call: what each part of the engine saves of an agent's turn.

Recorded sessions give system text, tools, calls and results. The trained hybrid demo model thinks
some tokens of its own; then it recites the recorded call, which no grammar demands of it. Counted
on this machine: tokens that are prefilled after a result has arrived, and passes up to the call's
first byte and to its end. The curves of other devices give the times of so many tokens and passes
behind a long prefix. The engine reckons with such a curve and no clock, so that no count depends on
this machine.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx_provider
from device_curves import CHIPS, HOST, MODELS, Estimate
from mlx_provider.client.connection import InProcessClient
from mlx_provider.config import EngineSettings
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.protocol.events import Delta, Done, Event, Failed, Usage
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling
from mlx_provider.serving import drafting as sparse_prefill
from mlx_provider.serving import engine_builder, structure
from mlx_provider.serving.service import ChatService
from mlx_provider_bench.report import Result, surroundings
from mlx_provider_drafters.prompt_scoring import passes as scoring_passes
from recital import Recital
from recorded_agents import Session, sessions
from replaced import Replaced
from sparse_prefill import SCORER
from tiny import build
from tiny.tokenizers import QWEN
from watched_passes import Passes, watched

HYBRID = Path(mlx_provider.__file__).parent / "demo" / "hybrid"
TURNS = 4
DEPTH = 32_000
"""Cached tokens on the devices that are not here."""
PRICED = {chip: Estimate(CHIPS[chip], MODELS["hybrid 9B"]) for chip in ("M3 Max", "M5 Max")}
RECKONED = PRICED["M3 Max"]
SHARE = 0.3
"""Of a prompt that sparse prefill computes."""
LONG = 512
"""Tokens from which on a prompt is long here."""
PATIENCE = 600
OPENS_THOUGHTS = QWEN.template.replace(
    "{{ '<|im_start|>assistant\\n' }}\n{%- if enable",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}\n{%- if enable",
)


@dataclass(frozen=True)
class Setting:
    """What is on and off."""

    name: str
    drafter: str = "auto"
    choice: str = "auto"
    forecasts: bool = True
    early_prefill: bool = True
    keeps_prefix: bool = True
    """Else it is evicted while the tool runs."""
    sparse: bool = False

    def options(self, scorer: Path) -> ModelOptions:
        if not self.sparse:
            return ModelOptions(drafter=self.drafter)
        return ModelOptions(draft_model=str(scorer), sparse_prefill=SHARE)


SETTINGS = (
    Setting("all on"),
    Setting("no forecasts", forecasts=False),
    Setting("call demanded: forced text", choice="required"),
    Setting("drafter off", drafter="off"),
    Setting("drafter grammar", drafter="grammar"),
    Setting("drafter lookup", drafter="lookup"),
    Setting("drafter mtp", drafter="mtp"),
    Setting("no early prefill", early_prefill=False),
    Setting("prefix evicted", keeps_prefix=False),
    Setting("prefix evicted, sparse prefill", keeps_prefix=False, sparse=True),
)


@dataclass
class Turn:
    """A reply to a result."""

    arrived: float
    first_byte: float = 0.0
    """Seconds from the result to the first byte of the call,"""
    ended: float = 0.0
    """and to its end."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage | None = None
    passes: Passes = field(default_factory=Passes)

    @property
    def prefilled(self) -> int:
        """Tokens that are computed after the result has arrived."""
        used = self.used
        return used.prompt_tokens - used.cached_tokens - used.skipped_tokens

    @property
    def used(self) -> Usage:
        if self.usage is None:
            raise RuntimeError("the reply has not ended")
        return self.usage

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise RuntimeError(event.error.message)
        if isinstance(event, Done):
            self.usage, self.ended = event.usage, time.perf_counter() - self.arrived
        elif isinstance(event, Delta):
            for piece in event.tool_calls:
                self.first_byte = self.first_byte or time.perf_counter() - self.arrived
                if piece.index == len(self.calls):
                    made = {"name": piece.name, "arguments": ""}
                    self.calls.append({"id": piece.id, "type": "function", "function": made})
                self.calls[piece.index]["function"]["arguments"] += piece.arguments


@dataclass(frozen=True)
class Means:
    """Of the turns of a session that begin with a result, their means."""

    session: str
    setting: str
    result: int
    """Tokens of a result."""
    prefilled: int
    """Tokens that are computed after it has arrived."""
    begun: int
    """Passes up to the first byte of the call,"""
    passes: int
    """and to its end."""
    waits: int
    """Passes that were launched after the last one had been read."""
    tokens: int
    first_byte: float
    ended: float
    devices: dict[str, dict[str, float]]
    """Seconds to the first token, to the first byte of the call and to the end, by device."""


def bench() -> Result:
    with tempfile.TemporaryDirectory() as root, Replaced() as patch:
        folders = _written(Path(root))
        patch.setattr(engine_builder, "calibrate", lambda *_: RECKONED.measured())
        patch.setattr(sparse_prefill, "LONG", LONG)
        service = ChatService(EngineSettings(measurements="off"))
        try:
            found = [
                _measured(service, folders, name, session, setting)
                for name, session in sessions().items()
                for setting in SETTINGS
            ]
        finally:
            service.close()
    return {
        "benchmark": "agent_turn",
        **surroundings("float32"),
        "turns": [asdict(each) for each in found],
    }


@dataclass(frozen=True)
class Folders:
    model: Path
    scorer: Path


def _written(root: Path) -> Folders:
    """The hybrid model, with a template that opens a thought; one of random weights that scores
    prompts, because how many tokens it keeps does not depend on the scores."""
    model = Path(shutil.copytree(HYBRID, root / "model"))
    (model / "chat_template.jinja").write_text(OPENS_THOUGHTS)
    scorer = build(root / "scorer", "qwen3", vocab_size=1536, num_hidden_layers=1)
    shutil.copy(HYBRID / "tokenizer.json", scorer)
    return Folders(model, scorer)


def _measured(
    service: ChatService, folders: Folders, name: str, session: Session, setting: Setting
) -> Means:
    options = setting.options(folders.scorer)
    view, lease = service._models.use(str(folders.model), options)
    with lease:
        model, engine = view.model, view.engine
        _begin_anew(engine)
        with Replaced() as patch:
            _switch(patch, service, setting)
            recital = Recital(patch, model)
            asked = partial(
                GenerateRequest,
                model=str(folders.model),
                options=options,
                tools=session.tools,
                tool_choice=setting.choice,
                parallel_tool_calls=False,
                max_tokens=400,
                session="agent",
                tenant=f"{name} {setting.name}",
            )
            played = list(_played(service, asked, session, setting, engine, recital))
        results = [len(model.tokenizer.encode_plain(each)) for each in session.results[: TURNS - 1]]
    return _means(name, setting, round(fmean(results)), played[1:])


def _begin_anew(engine: Engine) -> None:
    """The engine reckons with the curve alone, and has learned nothing of drafts."""
    engine.clock = _still
    speculation = engine.drafting._speculation
    if speculation is not None:
        speculation.clock, speculation.policy = _still, Policy()


def _still() -> float:
    return 0.0


def _switch(patch: Replaced, service: ChatService, setting: Setting) -> None:
    if not setting.early_prefill:
        patch.setattr(service._next_prompts, "await_results", lambda turn: None)
    if not setting.forecasts:
        patch.setattr(structure, "CallMatchers", lambda *_: None)


def _played(
    service: ChatService,
    asked: Callable[..., GenerateRequest],
    session: Session,
    setting: Setting,
    engine: Engine,
    recital: Recital,
) -> Iterator[Turn]:
    client = InProcessClient(service)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": session.system},
        {"role": "user", "content": session.asked},
    ]
    for at in range(TURNS):
        call, result = session.calls[at], session.results[at]
        sampling = Sampling(temperature=1, seed=at)
        request = asked(messages=messages, sampling=sampling)
        recital.call = call
        turn = Turn(time.perf_counter())
        with watched(engine) as turn.passes:
            generation = client.submit(request)
            while events := generation.get(PATIENCE):
                for event in events:
                    turn.take(event)
        if not turn.calls:
            raise RuntimeError("a reply without a call")
        yield turn
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": turn.calls}
        told = [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in turn.calls]
        messages = [*messages, said, *told]
        _run_tools(service, engine)
        if not setting.keeps_prefix:
            service.cache_clear()


def _run_tools(service: ChatService, engine: Engine) -> None:
    """Until what is computed meanwhile is computed: a tool may take longer."""
    worker = service._worker

    def busy() -> bool:
        return bool(worker._idle_calls) or not engine.idle

    for _ in range(2):
        while worker.call(busy).result(PATIENCE):
            time.sleep(0.001)
        service._next_prompts._pool.submit(int).result(PATIENCE)


def _means(name: str, setting: Setting, result: int, turns: Sequence[Turn]) -> Means:
    def mean(value: Callable[[Turn], float]) -> float:
        return fmean(map(value, turns))

    return Means(
        name,
        setting.name,
        result,
        round(mean(lambda turn: turn.prefilled)),
        round(mean(lambda turn: turn.passes.begun)),
        round(mean(lambda turn: turn.passes.read)),
        round(mean(lambda turn: turn.passes.waits)),
        round(mean(lambda turn: turn.used.completion_tokens)),
        round(mean(lambda turn: turn.first_byte), 2),
        round(mean(lambda turn: turn.ended), 2),
        {chip: _priced(device, setting, turns) for chip, device in PRICED.items()},
    )


def _priced(device: Estimate, setting: Setting, turns: Sequence[Turn]) -> dict[str, float]:
    first = [_first_token(device, setting, turn) for turn in turns]

    def at(passes: Callable[[Turn], int]) -> float:
        whole = (
            start + sum(each.seconds(device, DEPTH) for each in turn.passes.all[: passes(turn)])
            for start, turn in zip(first, turns, strict=True)
        )
        return round(fmean(whole), 2)

    return {
        "first_token": round(fmean(first), 2),
        "first_byte": at(lambda turn: turn.passes.begun),
        "ended": at(lambda turn: turn.passes.read),
    }


def _first_token(device: Estimate, setting: Setting, turn: Turn) -> float:
    if setting.keeps_prefix:
        return HOST + device.seconds(0, 0, turn.prefilled, DEPTH)
    kept = round(DEPTH * turn.prefilled / turn.used.prompt_tokens)
    scoring = 0.0
    if setting.sparse:
        scorer = Estimate(device.chip, SCORER)
        pieces = scoring_passes(DEPTH)
        scoring = sum(HOST + scorer.seconds(0, 0, tokens, depth) for tokens, depth in pieces)
    return HOST + scoring + device.seconds(0, 0, kept, kept // 2)
