"""`budgets`: what agents with long prompts compute on small prefix budgets. It counts, no clock.

The prefix cache and its policy are the real ones; rows hold tiny arrays that follow from the
tokens. Budgets are in tokens of the model's KV. `computed` is the mean per turn, the first turn of
each session left out; `least` is what a cache computes that keeps the longest head of each
session's last prompt that its share of the budget holds, with the state at its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from agent_traffic import LAYER_BYTES, TAIL, SimRequest, SyntheticModel, Traffic
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.policy import PrefixCachePolicy
from mlx_provider.engine.prefix_cache.tree import as_ids
from mlx_provider.engine.request import PrefillJob, Request, Row, SamplingParams
from mlx_provider.engine.row_cache import profile
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.records import Prompt
from schedules import Calls

CHUNK = 2048
"""Tokens of a prefill pass."""
Kind = Literal["kv", "window", "hybrid"]
KINDS: tuple[Kind, ...] = ("kv", "window", "hybrid")
TOKEN_BYTES = {"kv": 2 * LAYER_BYTES + 8, "window": LAYER_BYTES + 8, "hybrid": LAYER_BYTES + 8}
"""What a token of a long prompt takes, its id included."""
BUDGETS = (20_000, 40_000, 80_000)


class Server:
    """Serves requests on one prefix cache, a pass at a time, as an engine does."""

    def __init__(
        self,
        cache: PrefixCache,
        model: SyntheticModel,
        *,
        chunk: int = CHUNK,
        calls: Calls | None = None,
    ) -> None:
        """`calls`: of the disk tier, where there is one."""
        self.model = model
        self.calls = calls
        self.chunk = chunk
        named = SimpleNamespace(
            info=SimpleNamespace(fingerprint="simulated"),
            tokenizer=SimpleNamespace(decode=lambda ids, skip_special: str(ids)),
        )
        policy: Any = PrefixCachePolicy
        row = model.make_cache()
        model.feed(row, as_ids(range(64)), 0, 64)
        self.policy = policy(cache, named, "", model.make_cache, memory=profile(row))

    def serve(
        self,
        asked: SimRequest,
        session: str | None = None,
        *,
        calls: bool = False,
        retain: bool = False,
    ) -> Request:
        """Prefill and decode one request; `cached` and `prefilled` tell what was computed.

        `calls`: its reply ends in calls.
        """
        prompt = Prompt(asked.prompt, snapshot_points=asked.ends)
        limits: dict[str, Any] = {"max_tokens": len(asked.reply), "events": EventQueue()}
        request = Request("simulated", prompt, SamplingParams(), session=session, **limits)
        request.retain = retain
        output: Any = None
        row = Row(request, 0, output)
        request.rows.append(row)
        job = PrefillJob(request, [row], asked.prompt)
        self.policy.look_up(job)
        self.policy.begin(job, len(asked.prompt) + len(asked.reply))
        if self.calls is not None and job.restoring:
            while job.restoring:
                self.calls.run()
            self.policy.begin(job, len(asked.prompt) + len(asked.reply))
        ids = as_ids(asked.prompt + asked.reply)
        while job.tokens_left:
            start, job.computed_tokens = job.computed_tokens, self._next(job)
            self.model.feed(job.row_cache(), ids, start, job.computed_tokens)
            request.prefilled_tokens += job.computed_tokens - start
            self.policy.after_pass(job, start)
        self.policy.keep_prefill(job)
        row.tokens = [*asked.reply]
        row.finish = "tool_calls" if calls else "stop"
        self.model.feed(job.row_cache(), ids, job.computed_tokens, len(ids))
        self.policy.keep_row(row, row.tokens, job.row_cache)
        return request

    def _next(self, job: PrefillJob) -> int:
        whole = (job.computed_tokens // self.chunk + 1) * self.chunk
        return min(whole, len(job.tokens), *[cut for cut in job.cuts if cut > job.computed_tokens])


@dataclass(frozen=True)
class Turns:
    """Agents' sessions on one budget."""

    layers: str
    sessions: int
    budget: int
    prompt: int
    """Tokens of a prompt, on average."""
    computed: int
    least: int
    bytes_over: int
    """Bytes that the prefix cache held above its budget, at most."""


def sessions(count: int, *, start: int, turns: int, seed: int = 0) -> Iterator[list[SimRequest]]:
    """Turns of agents that share their system prompt: calls, and results of 400 to 1,600 tokens."""
    traffic = Traffic(seed)
    system = traffic.tokens(6000)
    for _ in range(count):
        history, asked = system + traffic.tokens(start - 6000), []
        for turn in range(turns):
            call = traffic.tokens(120)
            asked.append(SimRequest(history + TAIL, (len(system), len(history)), call))
            history = history + TAIL + call + traffic.tokens(400 * (1 + turn % 4))
        yield asked


def replay(
    layers: Kind, budget: int, every: Sequence[Sequence[SimRequest]], state_units: int = 3000
) -> Turns:
    """Let sessions take turns on a budget of so many tokens."""
    model = SyntheticModel(layers, state_units=state_units)
    limit = budget * TOKEN_BYTES[layers]
    cache = PrefixCache(budget=lambda: limit)
    server, over = Server(cache, model), 0
    prompts, computed, least = [], [], []
    window, state = model.window * LAYER_BYTES, state_units * model.unit
    ends = {"kv": 0, "window": window, "hybrid": state}[layers] // TOKEN_BYTES[layers]
    for turn in range(len(every[0])):
        for number, session in enumerate(every):
            request = server.serve(session[turn], session=str(number))
            over = max(over, cache.nbytes - limit)
            if turn:
                last, now = len(session[turn - 1].prompt), len(session[turn].prompt)
                prompts.append(now)
                computed.append(request.prefilled_tokens)
                least.append(now - min(last, max(0, budget // len(every) - ends)))
    mean = [sum(each) // len(each) for each in (prompts, computed, least)]
    return Turns(layers, len(every), budget, *mean, max(0, over))


def run(*, start: int = 55_000, turns: int = 10) -> list[Turns]:
    """Sessions of about 60,000 tokens: one agent, and two that take turns."""
    return [
        replay(layers, budget, drawn)
        for count in (1, 2)
        for drawn in [list(sessions(count, start=start, turns=turns))]
        for layers in KINDS
        for budget in BUDGETS
    ]
