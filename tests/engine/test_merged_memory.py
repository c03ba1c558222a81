"""Rows in one cache are charged for its capacity, which is that of the longest row."""

from typing import Any

import pytest

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Request
from mlx_provider.engine.row_cache import profile
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.families.text import TextModel
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.testing.driver import new_engine, new_request, run
from mlx_provider.upstream.cache_classes import layers_of
from noted_calls import note_calls
from references import assert_as_alone
from stepping import step_until, submit

LENGTHS = (190, 100)
REPLY = 120


def rows(model: TextModel) -> tuple[Engine, list[Request], int]:
    """An engine with two rows of different lengths, and the bytes of one token."""
    row = model.make_cache()
    model.prefill(PrefillChunk(Prompt([1, 2, 3]), 0, 3, row))
    memory = profile(row)
    engine = new_engine(model, row_bytes=memory.row_bytes, max_chunk=256, reserve=16)
    asked = [
        new_request([20 + (i * 31 + j) % 200 for j in range(length)], max_tokens=REPLY)
        for i, length in enumerate(LENGTHS)
    ]
    submit(engine, *asked)
    return engine, asked, memory.token_bytes


def taken(engine: Engine) -> int:
    """Bytes of the buffers of the rows that decode."""
    groups: Any = engine.batch.layout
    every = [layer for group in groups.groups for layer in layers_of(group.cache)]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in every)


def test_a_shorter_row_is_charged_for_a_step_when_the_longest_takes_it(qwen3: TextModel) -> None:
    engine, _, each = rows(qwen3)
    rooms = set()
    step_until(engine, lambda: len(engine.scheduler.running) >= len(LENGTHS))
    while len(engine.scheduler.running) == len(LENGTHS):
        charged = engine.scheduler.live_bytes
        engine.step()
        rooms.add(taken(engine) // each)
        assert taken(engine) <= charged
    assert rooms >= {2 * 256, 2 * 512}, "both rows grew"


def test_a_preempted_row_is_not_merged_until_the_merge_needs_no_memory(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows fit into memory separately, but not both with the capacity of the longer one."""
    engine, asked, each = rows(qwen3)
    waited = note_calls(monkeypatch, Scheduler, "preempt_row", lambda _, row: row.request.id)
    vars(engine.scheduler.ledger).update(available=lambda: 3 * 256 * each)
    run(engine)
    assert waited == [asked[1].id]
    assert_as_alone(qwen3, *asked)
