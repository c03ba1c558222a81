"""What more engines behind one LiteLLM proxy bring.

Agents hold conversations with a model that sleeps as long as a device would compute: seconds for
the part of a prompt that is not cached, and for each token. So the engines of this run need few
cores, and what remains is the router's: how evenly it spreads agents, and whether their prefixes
stay. Engines, proxy, sockets, schedulers and prefix caches are the real ones.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from fleet_processes import PATIENCE, TcpEngine, WrittenProxy
from mlx_provider.errors import BadRequest
from mlx_provider.gateway.config import Served
from mlx_provider.gateway.files import write_pair
from mlx_provider.gateway.fleet import Fleet
from mlx_provider.testing.scripted import Step, build, environment, script
from mlx_provider_bench.report import Result, against, print_rows, surroundings
from simulation.device import Speed
from simulation.engines import Engines, Machine
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.trace import Asked, workload_of

TARGET = 0.9
CONTEXT = 32_768
NAME = "scripted"
ALONE = ("least-busy", "simple-shuffle")
"""LiteLLM's routing strategies without affinity."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how large."""

    engines: Sequence[int] = (1, 2, 4)
    agents: int = 16
    turns: int = 4
    words: int = 500
    """Of each agent's own system prompt."""
    prefill: float = 1.0
    """Seconds for a prompt of which nothing is cached."""
    token: float = 0.01
    """Seconds for a token of an answer; rows that decode together take turns."""
    count: int = 12
    """Numbers in an answer."""
    apart: float = 0.2
    """Seconds between the starts of two agents: those of one moment look alike to the router."""
    policy: str = "affinity"
    """Who chooses the engine: `affinity`, as `init --engine` has it, or one of `ALONE`."""


@dataclass
class Account:
    """What the agents of a run were told."""

    places: dict[int, list[str]] = field(default_factory=dict)
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    asked: list[Asked] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(map(len, self.places.values()))

    @property
    def moves(self) -> int:
        return sum(len(set(places)) - 1 for places in self.places.values())

    def row(self, engines: int) -> Result:
        spread = Counter(places[0] for places in self.places.values())
        return {
            "engines": engines,
            "requests_per_second": round(self.requests / self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "hit_rate": round(self.cached / max(1, self.prompt), 4),
            "agents_by_engine": sorted(spread.values(), reverse=True),
            "moves": self.moves,
        }


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr. Raises `BadRequest` for another policy."""
    if plan.policy not in ("affinity", *ALONE):
        raise BadRequest(f"{plan.policy!r} is none of affinity, {', '.join(ALONE)}", param="policy")
    rows: list[Result] = []
    for engines in plan.engines:
        with tempfile.TemporaryDirectory(prefix="mlxp-fleet-") as scratch, ExitStack() as ending:
            proxy = _started(Path(scratch), engines, ending, plan.policy)
            _agents(plan, proxy, turns=1, first=-4 * engines, agents=4 * engines)  # models load
            account = _agents(plan, proxy, plan.turns, 0, plan.agents)
            rows.append(account.row(engines) | {"simulated": _simulated(plan, account, engines)})
        _compare(rows)
    print_rows("engines behind one proxy", COLUMNS, rows)
    return surroundings("none") | {"plan": vars(plan) | {"engines": [*plan.engines]}, "rows": rows}


COLUMNS = {
    "engines": "engines",
    "requests/s": "requests_per_second",
    "tokens/s": "tokens_per_second",
    "of linear": "of_linear",
    "hit rate of later turns": "hit_rate",
    "as simulated": "simulated",
    "agents by engine": "agents_by_engine",
    "moves": "moves",
}


def _compare(rows: list[Result]) -> None:
    """The last row beside the first."""
    first, last = rows[0], rows[-1]
    more = last["engines"] / first["engines"]
    rate = last["requests_per_second"] / first["requests_per_second"] / more
    last["of_linear"] = against(rate, TARGET, at_least=True)


def _simulated(plan: Plan, account: Account, engines: int) -> float:
    """The hit rate of the same requests in `bench fleet-simulation`, each asked as soon as the one
    before is answered; no two agents share a head, so that first turns have none."""
    longest = max(each.prompt for each in account.asked)
    speed = Speed(token=plan.prefill / longest, step=[plan.token * n for n in range(1, 65)])
    fleet = Engines(engines, Machine(speed, cache_bytes=1e12))
    timed = workload_of(account.asked)
    work = replace(timed, gap=[0.0] * timed.requests, timed=False)
    found = Run(work, fleet, POLICIES[plan.policy](engines, 0)).done()
    return round(found.memory / max(1, account.prompt), 4)


def _started(root: Path, count: int, ending: ExitStack, policy: str) -> WrittenProxy:
    """So many engines and their proxy, all of which answer."""
    model = build(root / "model", merges=2000, context_length=CONTEXT)
    found = environment(root / "site") | {"MLX_PROVIDER_MODEL_ROOTS": str(root)}
    engines = [TcpEngine(root / f"engine-{n}", found) for n in range(count)]
    fleet = Fleet(tuple(each.url for each in engines))
    folder = root / "proxy"
    served = Served(NAME, str(model), CONTEXT, 1024, own_context=CONTEXT)
    write_pair(folder, served, fleet, force=False)
    if policy in ALONE:
        _without_affinity(folder / "config.yaml", policy)
    keys = {name: each.key for name, each in zip(fleet.keys, engines, strict=True)}
    proxy = WrittenProxy(folder, keys)
    started: list[TcpEngine | WrittenProxy] = [*engines, proxy]
    for each in started:
        ending.callback(each.end)
        each.start()
    for each in started:
        each.wait()
    return proxy


def _without_affinity(path: Path, strategy: str) -> None:
    config = yaml.safe_load(path.read_text())
    config["router_settings"] |= {"routing_strategy": strategy, "optional_pre_call_checks": []}
    path.write_text(json.dumps(config))


def _agents(plan: Plan, proxy: WrittenProxy, turns: int, first: int, agents: int) -> Account:
    account, numbers = Account(), range(first, first + agents)
    with ThreadPoolExecutor(agents) as pool:
        running = []
        for number in numbers:
            running.append(pool.submit(_agent, plan, proxy, turns, number, account))
            time.sleep(plan.apart)
        for each in running:
            each.result()
    account.seconds = time.monotonic() - account.began
    return account


def _agent(plan: Plan, proxy: WrittenProxy, turns: int, number: int, account: Account) -> None:
    """One conversation; each turn repeats all before it."""
    head = {"role": "system", "content": f"Agent {number}. " + "You work with care. " * plan.words}
    messages, places = [head], account.places.setdefault(number, [])
    step = script(Step(count=plan.count, slow=plan.token, prefill=plan.prefill))
    headers = {"authorization": f"Bearer {proxy.key}"}
    with httpx.Client(trust_env=False, timeout=PATIENCE, headers=headers) as http:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{number}.{turn}: {step}"})
            body = {"model": NAME, "messages": messages, "temperature": 0}
            asked = time.monotonic() - account.began
            reply = http.post(f"{proxy.url}/v1/chat/completions", json=body)
            reply.raise_for_status()
            told: dict[str, Any] = json.loads(reply.content)
            places.append(reply.headers["x-litellm-model-id"].partition(" on ")[2])
            messages.append(
                {"role": "assistant", "content": told["choices"][0]["message"]["content"]}
            )
            _count(account, told["usage"], later=turn > 0)
            account.asked.append(_asked(asked, number, told["usage"]))


def _count(account: Account, usage: dict[str, Any], *, later: bool) -> None:
    account.tokens += usage["completion_tokens"]
    if later:
        account.prompt += usage["prompt_tokens"]
        account.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _asked(time: float, number: int, usage: dict[str, Any]) -> Asked:
    """A request as the simulation knows it."""
    prompt, answer = usage["prompt_tokens"], usage["completion_tokens"]
    return Asked(time=time, session=str(number), prompt=prompt, answer=answer)
