"""What the host reads between two passes with drafts of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from device_reads import DeviceReads
from host_gap import SAMPLING, Three
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import SamplingParams
from mlx_provider.engine.speculation.speculation import Speculation
from mlx_provider.records import DraftOptions
from mlx_provider.testing.driver import new_engine, new_request
from mlx_provider_mtp import start

PASSES = 8


def decoding(found: Any, rows: int, params: SamplingParams) -> Engine:
    """An engine whose rows decode with drafts."""
    model = found.model
    drafting = start(found.folder, model, DraftOptions())
    speculation = Speculation(drafting, vocab=model.info.vocab_size, shows=model, policy=Three())
    engine = new_engine(model, speculation=speculation, max_chunk=64)
    for at in range(rows):
        prompt = range(20 + 9 * at, 40 + 9 * at)
        engine.submit(new_request(prompt, max_tokens=200, params=params))
    while len(engine.scheduler.running) < rows:
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_pass_with_drafts_is_launched_before_the_last_one_is_read(
    tiny: Callable[..., Any], rows: int, sampling: str
) -> None:
    engine = decoding(tiny("qwen3_5_text"), rows, SAMPLING[sampling])
    drafted = engine.recent.drafted
    with DeviceReads(engine) as reads:
        while reads.passes < PASSES:
            engine.step()
    assert engine.recent.drafted >= drafted + 3 * rows * (PASSES - 1)
    assert (reads.idle, reads.others) == (0, 0)
