"""From a tool's result to the next call: what each part of the engine saves of an agent's turn.

Recorded sessions give system text, tools and results; a model with random weights thinks a few
tokens and writes a call whose grammar is that of the tools. Counted on this machine: tokens that
are prefilled after a result has arrived, and passes up to the call's first byte and to its end. The
curves of other devices give the times of so many tokens and passes behind a long prefix.

A random model makes no call by its own choice. So for `auto` the same grammar holds it to the
calls, but tells the engine of no forced text: what is drafted comes from the forecast alone.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from device_curves import CHIPS, HOST, MODELS, Estimate
from mlx_provider.chat.output.reply import Reply
from mlx_provider.client.in_process import InProcessClient
from mlx_provider.config import EngineSettings
from mlx_provider.engine.engine import Engine
from mlx_provider.protocol.events import Delta, Done, Event, Failed, Usage
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.protocol.sampling import Sampling
from mlx_provider.serving.service import ChatService
from mlx_provider.serving.structure import ThinkingBudget
from mlx_provider.testing.tiny.tokenizers import QWEN
from mlx_provider.wire.anthropic.messages import chat_messages
from mlx_provider.wire.responses.conversation import messages_of
from mlx_provider_bench.models.random_weights import write_model
from mlx_provider_bench.report import Result, surroundings
from replaced import Replaced

RECORDED = Path(__file__).parents[1] / "data" / "requests"
THOUGHT = 24
"""Tokens of a thought."""
VALUE = 24
"""Most characters of a text in a call."""
SYSTEM = 3000
"""Characters of the system text, so that a CPU can prefill it."""
TURNS = 4
DEPTH = 32_000
"""Cached tokens on the devices that are not here."""
DEVICES = (("M3 Max", "dense 8B"), ("M5 Max", "dense 8B"), ("M5 Max", "hybrid 9B"))
AUTO, DRAFTS, AHEAD, PREFIX = "forced text", "drafts", "early prefill", "prefix"
PARTS: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({AUTO}),
    frozenset({DRAFTS}),
    frozenset({AHEAD}),
    frozenset({AHEAD, DRAFTS}),
    frozenset({PREFIX}),
)
"""What is left out. Without `AUTO`, forecasts draft, as with `tool_choice: auto`; without `DRAFTS`,
neither they nor forced text; without `PREFIX`, the prefix was evicted while the tool ran."""
OPENS_THOUGHTS = QWEN.template.replace(
    "{{ '<|im_start|>assistant\\n' }}\n{%- if enable",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}\n{%- if enable",
)
PATIENCE = 600


@dataclass(frozen=True)
class Plan:
    template: Path | None = None
    """A chat template, in place of a short one that opens a thought."""
    family: str = "qwen3"
    hidden: int = 256
    layers: int = 4


@dataclass(frozen=True)
class Recorded:
    """What a client sends."""

    system: str
    asked: str
    tools: list[dict[str, Any]]
    results: list[str]


@dataclass
class Turn:
    """A reply to a result."""

    arrived: float
    first_byte: float = 0.0
    """Seconds from the result to the first byte of the call,"""
    ended: float = 0.0
    """and to its end."""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise RuntimeError(event.error.message)
        if isinstance(event, Done):
            self.usage, self.ended = event.usage, time.perf_counter() - self.arrived
        elif isinstance(event, Delta):
            self.reasoning += event.reasoning
            for piece in event.tool_calls:
                self.first_byte = self.first_byte or time.perf_counter() - self.arrived
                if piece.index == len(self.calls):
                    made = {"name": piece.name, "arguments": ""}
                    self.calls.append({"id": piece.id, "type": "function", "function": made})
                self.calls[piece.index]["function"]["arguments"] += piece.arguments


@dataclass(frozen=True)
class Medians:
    """Of the turns of a session that begin with a result."""

    session: str
    thoughts: str
    """Whether the client returns them."""
    without: str
    """The part that is off."""
    result: int
    """Tokens of a result."""
    prefilled: int
    """Tokens that are computed after it has arrived."""
    begun: int
    """Passes up to the first byte of the call,"""
    passes: int
    """and of the reply."""
    tokens: int
    first_byte: float
    ended: float
    devices: dict[str, dict[str, float]]
    """Seconds to the first token, to the first byte of the call and to the end, by device."""


def bench(plan: Plan) -> Result:
    with tempfile.TemporaryDirectory() as root:
        folder = write_model(Path(root) / "m", plan.family, "float32", plan.hidden, plan.layers)
        template = plan.template.read_text() if plan.template else OPENS_THOUGHTS
        (folder / "chat_template.jinja").write_text(template)
        service = ChatService(EngineSettings(measurements="off"))
        try:
            found = list(_measured(service, str(folder)))
        finally:
            service.close()
    return {
        "benchmark": "agent_turn",
        **{name: str(value) for name, value in asdict(plan).items()},
        **surroundings("float32"),
        "turns": [asdict(each) for each in found],
    }


def _measured(service: ChatService, folder: str) -> Iterator[Medians]:
    client = InProcessClient(service)
    for name, recorded in sessions().items():
        for returned in (True, False):
            for parts in PARTS:
                with _without(service, parts), _begun_calls() as begun:
                    played = _play(service, client, folder, recorded, returned, parts)
                yield _medians(service, folder, recorded, played, begun, name, returned, parts)


def sessions() -> dict[str, Recorded]:
    """Recorded sessions by client, with what the results of the longest one hold."""
    chat = _body("08b_chat_long_history_turn_n_plus_1")
    results = [m["content"] for m in chat["messages"] if m["role"] == "tool"]
    message = _body("03_messages_claude_code")
    claude, _ = chat_messages(message["system"], message["messages"])
    named = [each for each in message["tools"] if each.get("input_schema")]
    tools = [_tool(each["name"], each["input_schema"]) for each in named]
    functions = [each["function"] for each in chat["tools"]]
    response = _body("02_responses_codex_developer")
    codex, _ = messages_of(response["input"], None)
    own = [each for each in response["tools"] if each["type"] == "function"]
    return {
        "OpenCode": _recorded(
            chat["messages"], [_tool(f["name"], f["parameters"]) for f in functions], results
        ),
        "Claude Code": _recorded(claude, tools, results),
        "Codex": _recorded(codex, [_tool(f["name"], f["parameters"]) for f in own], results),
    }


def _body(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())["body"]
    return body


def _recorded(messages: Any, tools: list[dict[str, Any]], results: list[str]) -> Recorded:
    system, asked = (
        _text(next(m["content"] for m in messages if m["role"] in roles))
        for roles in (("system", "developer"), ("user",))
    )
    return Recorded(system[:SYSTEM], asked, tools, results)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)


def _tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool whose texts are short, because a random model ends none, with what it requires."""
    needed = schema.get("required", [])
    properties = {
        key: {"type": "string", "maxLength": VALUE} if kind.get("type") == "string" else kind
        for key, kind in schema["properties"].items()
        if key in needed
    }
    parameters = {"type": "object", "properties": properties, "required": needed}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@contextmanager
def _without(service: ChatService, parts: frozenset[str]) -> Iterator[None]:
    prompts = service._next_prompts
    with Replaced() as patch:
        if AHEAD in parts:
            patch.setattr(prompts, "await_results", lambda turn: None)
        if AUTO in parts:
            patch.setattr(ThinkingBudget, "forced", lambda constraint: ())
        yield


@contextmanager
def _begun_calls() -> Iterator[list[int]]:
    """The passes of each reply up to the first byte of its call."""
    passes, first, found = count(), dict[Reply, int](), list[int]()
    step, push = Engine.step, Reply.push
    now = 0

    def stepped(engine: Engine) -> Any:
        nonlocal now
        now = next(passes)
        return step(engine)

    def pushed(reply: Reply, *given: Any) -> list[Delta]:
        deltas = push(reply, *given)
        began = first.setdefault(reply, now)
        if began >= 0 and any(delta.tool_calls for delta in deltas):
            found.append(1 + now - began)
            first[reply] = -1
        return deltas

    with Replaced() as patch:
        patch.setattr(Engine, "step", stepped)
        patch.setattr(Reply, "push", pushed)
        yield found


def _play(
    service: ChatService,
    client: InProcessClient,
    folder: str,
    recorded: Recorded,
    returned: bool,
    parts: frozenset[str],
) -> list[Turn]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": recorded.system},
        {"role": "user", "content": recorded.asked},
    ]
    turns: list[Turn] = []
    for at in range(TURNS):
        request = GenerateRequest(
            model=folder,
            messages=messages,
            tools=recorded.tools,
            tool_choice="required",
            parallel_tool_calls=False,
            thinking_budget=THOUGHT,
            max_tokens=400,
            drafts=DRAFTS not in parts,
            sampling=Sampling(temperature=1, seed=at),
            session="agent",
            tenant=f"{recorded.asked[:20]} {returned} {sorted(parts)}",
        )
        turn = Turn(time.perf_counter())
        generation = client.submit(request)
        while events := generation.get(PATIENCE):
            for event in events:
                turn.take(event)
        turns.append(turn)
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": turn.calls}
        if returned:
            said["reasoning_content"] = turn.reasoning
        result = recorded.results[at]
        told = [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in turn.calls]
        messages = [*messages, said, *told]
        _run_tools(service, folder)
        if PREFIX in parts:
            service.cache_clear()
    return turns


def _run_tools(service: ChatService, folder: str) -> None:
    """Until what is computed meanwhile is computed: a tool may take longer."""
    worker = service._worker
    with service._models.use(folder, ModelOptions()) as lease:
        engine = lease.view.engine

    def busy() -> bool:
        return bool(worker._idle_calls) or not engine.idle

    for _ in range(2):
        while worker.call(busy).result(PATIENCE):
            time.sleep(0.001)
        service._next_prompts._pool.submit(int).result(PATIENCE)


def _medians(
    service: ChatService,
    folder: str,
    recorded: Recorded,
    played: list[Turn],
    begun: list[int],
    name: str,
    returned: bool,
    parts: frozenset[str],
) -> Medians:
    with service._models.use(folder, ModelOptions()) as lease:
        encode = lease.view.model.tokenizer.encode_plain
        results = [len(encode(each)) for each in recorded.results[: TURNS - 1]]
    used = [turn.usage for turn in played[1:] if turn.usage is not None]
    prefilled = [each.prompt_tokens - each.cached_tokens for each in used]
    passes = round(median(each.completion_tokens - each.accepted_tokens for each in used))
    new, first = round(median(prefilled)), round(median(begun[1:]))
    there = (DEPTH, 0) if PREFIX in parts else (new, DEPTH)
    return Medians(
        name,
        "returned" if returned else "dropped",
        " and ".join(sorted(parts)) or "-",
        round(median(results)),
        new,
        first,
        passes,
        round(median(each.completion_tokens for each in used)),
        round(median(turn.first_byte for turn in played[1:]), 3),
        round(median(turn.ended for turn in played[1:]), 3),
        {
            f"{chip}, {model}": _estimate(chip, model, *there, first, passes)
            for chip, model in DEVICES
        },
    )


def _estimate(
    chip: str, model: str, prefilled: int, deep: int, begun: int, passes: int
) -> dict[str, float]:
    """`prefilled`: tokens behind `deep` ones that are cached."""
    device = Estimate(CHIPS[chip], MODELS[model])
    first = HOST + device.seconds(0, 0, prefilled, deep or prefilled // 2)
    each = max(HOST, device.seconds(1, DEPTH))
    return {
        "first_token": round(first, 3),
        "first_byte": round(first + begun * each, 3),
        "ended": round(first + passes * each, 3),
    }
