"""Counts how often the host reads arrays other than drawn tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from host_gap import Three
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import SamplingParams
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.records import LoadedModel
from mlx_provider.testing.driver import new_engine, new_request
from replaced import Replaced, wrap
from stepping import step_until

READS = ((mx.array, "tolist"), (mx.array, "item"), (mx, "eval"), (mx, "synchronize"))


def drafted_rows(model: LoadedModel, source: Source, rows: int, params: SamplingParams) -> Engine:
    """An engine whose rows decode with three drafts each."""
    speculation = Speculation(source, vocab=model.info.vocab_size, policy=Three())
    engine = new_engine(model, speculation=speculation, max_chunk=64)
    for at in range(rows):
        prompt = range(20 + 9 * at, 40 + 9 * at)
        engine.submit(new_request(prompt, max_tokens=200, params=params))
    step_until(engine, lambda: len(engine.scheduler.running) >= rows)
    for _ in range(3):
        engine.step()
    return engine


class DeviceReads(ExitStack):
    """While entered, watches the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.passes = 0
        self.others = 0
        """Reads of anything but drawn tokens."""
        self._engine = engine
        self._reading = False

    def __enter__(self) -> DeviceReads:
        patch = self.enter_context(Replaced())
        batch: Any = self._engine.batch
        wrap(patch, batch, "forward", self._launched)
        wrap(patch, batch, "catch_up", self._reads)
        for owner, name in READS:
            wrap(patch, owner, name, self._counted)
        return self

    def _launched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            self.passes += 1
            return forward(*args)

        return launch

    def _reads(self, read: Callable[[], Any]) -> Callable[[], Any]:
        def reads() -> Any:
            self._reading = True
            try:
                return read()
            finally:
                self._reading = False

        return reads

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.others += not self._reading
            return original(*args, **kwargs)

        return counted


def check_no_other_reads(engine: Engine, rows: int, passes: int = 8) -> None:
    """Only drawn tokens are read in so many passes, in which most rows have all three drafts."""
    drafted = engine.output.drafted
    with DeviceReads(engine) as reads:
        step_until(engine, lambda: reads.passes >= passes)
    assert engine.output.drafted >= drafted + 3 * rows * (passes - 1)
    assert reads.others == 0
