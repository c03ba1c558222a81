"""`traffic`: hit rates of the prefix cache over agent traffic, without a model.

The traffic is drawn once per seed. The prefix cache is the real one and keeps real cache objects;
their arrays are tiny and follow from the tokens, so a restored row can be compared with a cold one.
Reported per scenario: prompt tokens, the share that was reused, and what the prefix cache holds at
the end in units of one token's KV (a recurrent state counts as `STATE_UNITS`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.snapshots import choose_snapshots
from mlx_provider.engine.prefix_cache.tree import CacheKey, Ids, as_ids
from mlx_provider.records import Prompt

STATE_UNITS = 3000
"""Size of one recurrent state in token units (35B hybrid: 63 MB against 20 kB per token)."""
LAYER_BYTES = 8
"""One token in one layer: a float32 key and a float32 value."""
TAIL = [7, 7, 7]
"""The generation prompt after the last message."""

QUANTISED_BYTES = 48
"""The same of 32 floats each in 4 bits, with their scales and biases."""
Layers = Literal["kv", "quantised", "window", "hybrid", "state"]


@dataclass(frozen=True)
class SimRequest:
    """One prompt, its message ends, and the reply that was generated."""

    prompt: list[int]
    ends: tuple[int, ...]
    reply: list[int]


@dataclass(frozen=True)
class SimResult:
    """One scenario on one kind of model."""

    scenario: str
    layers: str
    requests: int
    prompt_tokens: int
    hit_rate: float
    units: int
    """What the prefix cache holds at the end, in token units."""


class SyntheticModel:
    """Makes and feeds row caches; what they hold follows from the tokens alone."""

    def __init__(self, layers: Layers, *, window: int = 512, state_units: int = STATE_UNITS):
        self.layers = layers
        self.window = window
        each = {"kv": 2, "quantised": 2, "window": 2, "hybrid": 1, "state": 0}[layers]
        self.width = 32 if layers == "quantised" else 1
        self.unit = (QUANTISED_BYTES if layers == "quantised" else LAYER_BYTES) * each + 8
        """Bytes that the prefix cache needs for one token, its id included."""
        self.state_floats = state_units * self.unit // 4

    def make_cache(self) -> list[Any]:
        """A fresh row cache of two layers."""
        from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

        second: dict[str, Callable[[], Any]] = {
            "kv": KVCache,
            "quantised": lambda: QuantizedKVCache(group_size=32, bits=4),
            "window": lambda: RotatingKVCache(max_size=self.window),
            "hybrid": lambda: ArraysCache(size=1),
            "state": lambda: ArraysCache(size=1),
        }
        if self.layers == "state":
            return [ArraysCache(size=2), ArraysCache(size=1)]
        if self.layers == "quantised":
            return [second["quantised"](), second["quantised"]()]
        return [KVCache(), second[self.layers]()]

    def feed(self, cache: list[Any], ids: Ids, start: int, stop: int) -> None:
        """Append tokens `start .. stop` of `ids` to a cache that holds the first `start`."""
        import mlx.core as mx

        if start == stop:
            return
        mixed = np.cumsum(ids[:stop] % 8191 * (np.arange(stop) % 127 + 1)) % 2**20
        new = mx.array(mixed[start:].astype(np.float32)).reshape(1, 1, -1, 1)
        new = mx.repeat(new, self.width, axis=-1)
        for layer in cache:
            if hasattr(layer, "update_and_fetch"):
                layer.update_and_fetch(new, -new)
            else:
                for slot in range(len(layer.cache)):
                    layer[slot] = mx.full((1, self.state_floats), float(mixed[-1]) + slot)
        mx.eval([layer.state for layer in cache])


def in_order(layer: Any, array: Any) -> Any:
    """Keys or values of a window in the order of their tokens."""
    return layer._temporal_order(array)


def serve(prefix_cache: PrefixCache, model: SyntheticModel, request: SimRequest) -> int:
    """What the engine does with the prefix cache for one request; the prompt tokens reused."""
    key = CacheKey("simulated")
    prompt, ids = as_ids(request.prompt), as_ids(request.prompt + request.reply)
    match = prefix_cache.match(key, prompt, len(prompt) - 1)
    cache = prefix_cache.acquire(match, model.make_cache)[0]
    at, snapshots = match.length, {}
    for stop in choose_snapshots(
        Prompt(request.prompt, snapshot_points=request.ends), at, match.branch
    ):
        model.feed(cache, ids, at, stop)
        at = stop
        snapshot = prefix_cache.snapshot(cache)
        if snapshot is not None:
            snapshots[stop] = snapshot
    model.feed(cache, ids, at, len(prompt))
    prefix_cache.insert(key, prompt, cache, snapshots)  # others may share it while this one decodes
    model.feed(cache, ids, len(prompt), len(ids))
    prefix_cache.insert(key, ids, cache, {}, reply_at=len(prompt))
    return match.length


class Traffic:
    """Draws the scenarios; one seed, one traffic."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(1, 150_000) for _ in range(count)]

    def rewritten(self, reply: list[int], chance: float) -> list[int]:
        """The reply as the client sends it back: sometimes tokenised another way."""
        kept = list(reply)
        if self._dice.random() < chance:
            at = self._dice.randrange(len(kept))
            kept[at : at + 1] = self.tokens(2)
        return kept

    def chat(
        self,
        users: int = 6,
        turns: int = 6,
        *,
        system: int = 2000,
        think: int = 0,
        rewritten: float = 0.0,
    ) -> list[SimRequest]:
        """Users that share a system prompt and take turns; thoughts are stripped."""
        shared, requests = self.tokens(system), []
        histories = [list(shared) for _ in range(users)]
        for _ in range(turns):
            for user in range(users):
                history = histories[user] + self.tokens(200)
                answer = self.tokens(300)
                reply = self.tokens(think) + answer
                requests.append(SimRequest(history + TAIL, (system, len(history)), reply))
                histories[user] = history + TAIL + self.rewritten(answer, rewritten)
        return requests

    def agent(
        self, tasks: int = 4, steps: int = 10, *, system: int = 6000, rewritten: float = 0.0
    ) -> list[SimRequest]:
        """Tasks one after another, each a loop of calls and tool results."""
        shared, requests = self.tokens(system), []
        for _ in range(tasks):
            history = shared + self.tokens(300)
            for _ in range(steps):
                call = self.tokens(120)
                requests.append(SimRequest(history + TAIL, (system, len(history)), call))
                history = history + TAIL + self.rewritten(call, rewritten) + self.tokens(800)
        return requests

    def branches(self, fan: int = 8, context: int = 8000) -> list[SimRequest]:
        """Several questions about one long context."""
        first = self.tokens(context) + self.tokens(100)
        reply = self.tokens(200)
        requests = [SimRequest(first + TAIL, (len(first),), reply)]
        base = first + TAIL + reply
        for _ in range(fan):
            history = base + self.tokens(100)
            requests.append(SimRequest(history + TAIL, (len(history),), self.tokens(200)))
        return requests

    def questions(
        self, documents: int = 3, fan: int = 5, *, system: int = 1000, context: int = 8000
    ) -> list[SimRequest]:
        """Documents in turn, each with several questions, which end the document's own message."""
        shared, requests = self.tokens(system), []
        texts = [self.tokens(context) for _ in range(documents)]
        for _ in range(fan):
            for text in texts:
                prompt = shared + text + self.tokens(60)
                ends = (system, len(prompt))
                requests.append(SimRequest(prompt + TAIL, ends, self.tokens(200)))
        return requests

    def excerpts(self, fan: int = 6, *, context: int = 8000, after: int = 3000) -> list[SimRequest]:
        """One long text, each time with another long one behind it in the same message."""
        text, requests = self.tokens(context), []
        for _ in range(fan):
            prompt = text + self.tokens(after)
            requests.append(SimRequest(prompt + TAIL, (len(prompt),), self.tokens(200)))
        return requests

    def side_requests(self, turns: int = 12, titles: int = 3) -> list[SimRequest]:
        """One long chat; after every turn a few short requests of another make (titles)."""
        requests: list[SimRequest] = []
        for turn in self.chat(1, turns):
            requests.append(turn)
            for _ in range(titles):
                title = self.tokens(400)
                requests.append(SimRequest(title + TAIL, (len(title),), self.tokens(20)))
        return requests


@cache
def scenarios(seed: int = 0) -> dict[str, list[SimRequest]]:
    """Every scenario by name."""
    traffic = Traffic(seed)
    return {
        "6 users x 6 turns, 2k system": traffic.chat(),
        "+ 500 thinking tokens, stripped": traffic.chat(think=500),
        "+ 30 % tokenised another way": traffic.chat(rewritten=0.3),
        "16 users x 4 turns": traffic.chat(users=16, turns=4),
        "agent 4 tasks x 10 steps, 6k system": traffic.agent(),
        "agent, 30 % tokenised another way": traffic.agent(rewritten=0.3),
        "8-way branch on 8k": traffic.branches(),
        "long chat with side requests": traffic.side_requests(),
        "5 questions about each of 3 documents": traffic.questions(),
        "6 long texts behind one of 8k": traffic.excerpts(),
    }


def simulate(
    name: str, requests: Sequence[SimRequest], layers: Layers, *, budget_units: int | None = None
) -> SimResult:
    """Run one scenario through a new prefix_cache of at most `budget_units` token units."""
    model = SyntheticModel(layers)
    budget = 2**62 if budget_units is None else budget_units * model.unit
    prefix_cache = PrefixCache(budget=lambda: budget)
    hit = sum(serve(prefix_cache, model, request) for request in requests)
    total = sum(len(request.prompt) for request in requests)
    report = prefix_cache.report()
    units = report["tokens"] + report["snapshots"] * STATE_UNITS * (layers != "kv")
    return SimResult(name, layers, len(requests), total, hit / total, units)
