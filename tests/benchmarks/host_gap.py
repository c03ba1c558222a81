"""Host work between two passes, and how long a device waits for it.

The device is imagined: each pass of the model, and each guess of a head or a draft model, takes a
fixed time on it, a draw takes none. The host is real: its time is the CPU time of the engine
thread, and it waits where it reads tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from draft_decisions import decisions
from kernel_count import LAYERS, deep_model
from mlx_provider.cores import cores
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution import sampler as drawing
from mlx_provider.engine.execution.decode_batch import DecodeBatch
from mlx_provider.engine.execution.grouped_kv import EarlyStart
from mlx_provider.engine.request import SamplingParams
from mlx_provider.engine.speculation.policy import Ask, Asks, Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import load_text
from mlx_provider.records import Drafting, DraftOptions, LoadedModel, LoadOptions, ShowsHidden
from mlx_provider.testing.driver import new_engine, new_request
from mlx_provider_bench.report import Result
from mlx_provider_drafters.draft_model import DraftModel
from mlx_provider_mtp import start as start_head
from replaced import Patch, Replaced, wrap
from tiny import build

SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature, top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}


class Three(Policy):
    """Three drafts for each row in each step."""

    def wanted(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
        return [(Ask(0, 3),)] * len(rows)


WARM = 8
"""Steps before those that count."""


@dataclass
class ImaginedDevice:
    """Runs launched passes one after the other."""

    seconds: float
    """Time of each pass."""
    host: Callable[[], float] = time.thread_time
    waited: float = 0.0
    """Time that the host has waited for tokens."""
    busy: float = 0.0
    """End of the last pass."""
    drawn: float = 0.0
    """End of the last pass whose tokens are drawn."""
    gaps: list[float] = field(default_factory=list)
    """Seconds without work for each pass: before it, or in it."""
    gap: float = 0.0
    """The same since the last pass."""
    begun: float = 0.0
    """Share of the pass that is built now which is launched already."""

    @property
    def now(self) -> float:
        return self.host() + self.waited

    def works(self, seconds: float) -> None:
        """It gets work for this long."""
        self.gap += max(0.0, self.now - self.busy)
        self.busy = max(self.busy, self.now) + seconds

    def runs(self, batch: Any) -> None:
        """Run the passes of `batch` from now on."""
        forward, drawn, read = batch.forward, batch.drawn, batch._read

        def launched(*args: Any) -> Any:
            self.begun = 0.0
            made = forward(*args)
            self.works((1 - self.begun) * self.seconds)
            self.gaps.append(self.gap)
            self.gap = 0.0
            return made

        def drew(*args: Any) -> None:
            drawn(*args)
            self.drawn = max(self.busy, self.now)

        def reads() -> Any:
            self.waited += max(0.0, self.drawn - self.now)
            return read()

        batch.forward, batch.drawn, batch._read = launched, drew, reads


def guesses(engine: Engine, device: ImaginedDevice, seconds: float, patch: Patch) -> None:
    """Run the guesses of the engine's drafter on the device, for so long each, and begin passes as
    early as the engine does."""
    drafting: Any = engine.drafting.sources[0].drafting
    attention = sum(hasattr(layer, "update_and_fetch") for layer in engine.model.make_cache())

    def guessing(propose: Callable[..., Any]) -> Callable[..., Any]:
        def proposed(*args: Any) -> Any:
            with Replaced() as meanwhile:
                wrap(meanwhile, mx, "async_eval", starting(lambda: device.works(seconds)))
                return propose(*args)

        return proposed

    def starting(work: Callable[[], None]) -> Callable[..., Any]:
        def with_work(original: Callable[..., Any]) -> Callable[..., Any]:
            def started(*args: Any) -> Any:
                work()
                return original(*args)

            return started

        return with_work

    def reaching(reached: Callable[..., None]) -> Callable[..., None]:
        def reach(early: Any, keys: mx.array) -> None:
            share = early._layers / attention
            with Replaced() as meanwhile:
                wrap(meanwhile, mx, "async_eval", starting(lambda: began(share)))
                reached(early, keys)

        return reach

    def began(share: float) -> None:
        device.works((share - device.begun) * device.seconds)
        device.begun = share

    wrap(patch, drafting, "propose", guessing)
    wrap(patch, EarlyStart, "reached", reaching)


def decoding(model: Any, rows: int, params: SamplingParams, steps: int, **more: Any) -> Engine:
    """An engine with rows that decode for at least this many steps."""
    engine = new_engine(model, max_chunk=64, **more)
    for at in range(rows):
        engine.submit(new_request(range(5, 15 + at), max_tokens=steps + 100, params=params))
    while len(engine.scheduler.running) < rows:
        engine.step()
    return engine


def gaps(engine: Engine, device: ImaginedDevice, steps: int) -> list[float]:
    """Seconds that the device waits before each of so many passes."""
    batch: DecodeBatch = engine.batch
    device.runs(batch)
    for _ in range(WARM + steps):
        engine.step()
    return device.gaps[WARM:]


def host_work(engine: Engine, steps: int) -> dict[str, float]:
    """Milliseconds of a step on the host, of the launch of its draw, and of all except launches. A
    wait for tokens counts as launch."""
    batch: Any = engine.batch
    forward, read, drawn = batch.forward, batch._read, batch.drawn
    launches, draws, whole = [0.0], list[float](), list[float]()

    def launched(*args: Any) -> Any:
        began = time.thread_time()
        made = forward(*args)
        launches.append(time.thread_time() - began)
        return made

    def reads() -> Any:
        began = time.thread_time()
        mx.synchronize()  # the CPU, which computes here, is no device that the host works for
        launches[-1] += time.thread_time() - began
        return read()

    def drew(*args: Any) -> None:
        began = time.thread_time()
        drawn(*args)
        draws.append(time.thread_time() - began)

    batch.forward, batch._read, batch.drawn = launched, reads, drew
    for _ in range(WARM + steps):
        began = time.thread_time()
        engine.step()
        whole.append(time.thread_time() - began)
    parts = zip(whole, launches[1:], draws, strict=True)
    rest = [step - launch - draw for step, launch, draw in parts]
    return {
        "step": round(1000 * median(whole[WARM:]), 2),
        "launch of its draw": round(1000 * median(draws[WARM:]), 2),
        "rest without launches": round(1000 * median(rest[WARM:]), 2),
    }


@dataclass(frozen=True)
class Plan:
    rows: Sequence[int] = (1, 8, 32)
    pass_ms: Sequence[float] = (10, 20, 40)
    steps: int = 40
    drafting_rows: Sequence[int] = (1, 4)
    guess_ms: float = 1
    """Of each guess of a head, for all rows; of a draft model, twice as long."""


def bench(plan: Plan) -> Result:
    """Milliseconds, by rows and sampling: a step on the host, parts of it, and the wait
    of devices with passes of several lengths; the wait for each pass with drafts; the time to
    decide which drafts a step has."""
    with tempfile.TemporaryDirectory() as scratch, Replaced() as patch:
        patch.setattr(drawing, "compiles", lambda: True)  # as on the device that is imagined
        plain = deep_model(Path(scratch) / "plain")
        found = measured(plain, plan)
        hybrid, head = hybrid_with_head(Path(scratch) / "head")
        drafting = {
            "head": drafted(hybrid, head, plan, plan.guess_ms, shows=hybrid),
            "draft model": drafted(
                plain, draft_model(Path(scratch) / "draft"), plan, 2 * plan.guess_ms
            ),
        }
    about = {"benchmark": "gap", **asdict(plan), "device": "imagined", "cores": cores()}
    return {
        **about,
        "ms": found,
        "ms with drafts": drafting,
        "ms to decide drafts": decisions(plan.rows),
    }


def hybrid_with_head(folder: Path) -> tuple[LoadedModel, Drafting]:
    """A model of as many layers, three of four recurrent, with its MTP head."""
    more = {"num_hidden_layers": LAYERS, "full_attention_interval": 4, "mtp_num_hidden_layers": 1}
    build(folder, "qwen3_5_text", dtype="bfloat16", foreseeable=True, **more)
    model = load_text(folder, LoadOptions())
    return model, start_head(folder, model, DraftOptions())


def draft_model(folder: Path) -> Drafting:
    """A draft model of four layers for `deep_model`."""
    small = load_text(build(folder, "qwen3", dtype="bfloat16", num_hidden_layers=4), LoadOptions())
    return DraftModel(small, small.info.vocab_size)


def drafted(
    model: LoadedModel,
    drafting: Drafting,
    plan: Plan,
    guess_ms: float,
    *,
    shows: ShowsHidden | None = None,
) -> dict[str, dict[str, float]]:
    """Milliseconds that a device waits for each pass whose rows all have three drafts."""
    found: dict[str, dict[str, float]] = {}
    for rows in plan.drafting_rows:
        for name, params in SAMPLING.items():
            own = found[f"{rows} rows, {name}"] = {}
            for each in plan.pass_ms:
                speculation = Speculation(
                    Source(drafting, shows), vocab=model.info.vocab_size, policy=Three()
                )
                engine = decoding(model, rows, params, 8 * plan.steps, speculation=speculation)
                device = ImaginedDevice(each / 1000)
                with Replaced() as patch:
                    guesses(engine, device, guess_ms / 1000, patch)
                    waits = gaps(engine, device, plan.steps)
                own[f"wait for a pass of {each} ms"] = round(1000 * median(waits), 2)
    return found


def measured(model: Any, plan: Plan) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for rows in plan.rows:
        for name, params in SAMPLING.items():
            own = found[f"{rows} rows, {name}"] = host_work(
                decoding(model, rows, params, plan.steps), plan.steps
            )
            for each in plan.pass_ms:
                engine = decoding(model, rows, params, plan.steps)
                waits = gaps(engine, ImaginedDevice(each / 1000), plan.steps)
                own[f"wait before a pass of {each} ms"] = round(1000 * median(waits), 2)
    return found
