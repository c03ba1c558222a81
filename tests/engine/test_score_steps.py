"""Scores in the engine: equal in any batch, with one prefill of the prompts' common part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.inputs import Scores
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.families.text import load_text
from mlx_provider.protocol.events import Scored
from mlx_provider.testing.driver import new_engine, new_request, run
from mlx_provider.testing.tiny import build
from mlx_provider.testing.tiny.quantised import quantise

SHARED = 128
YES, NO = 90, 41
HEAD = [30 + i * 7 % 200 for i in range(SHARED)]
PROMPTS = [[*HEAD, *(31 + i * k % 190 for i in range(n))] for k, n in ((3, 40), (5, 7), (11, 90))]


def new_scoring(prompts: Sequence[Sequence[int]], shared: int = SHARED) -> Request:
    wanted = Scores(prompts, shared, YES, NO)
    request = new_request(wanted.longest.tokens, max_tokens=0, inputs=wanted, may_skip=False)
    request.id = f"s{id(request):x}"
    return request


def scored(engine: Engine, *requests: Request) -> list[list[float]]:
    """The scores of some requests, from an engine that may have other requests."""
    for each in requests:
        engine.submit(each)
    found: dict[Request, list[float]] = {each: [] for each in requests}
    while not engine.idle:
        for each, events in engine.step():
            found.get(each, []).extend(e.score for e in events if isinstance(e, Scored))
    return list(found.values())


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", "float32"),
        ("qwen3", "4bit"),
        ("gemma3_text", "bfloat16"),
        ("qwen3_5_text", "bfloat16"),
    ],
)
def test_a_score_is_the_same_alone_in_a_batch_and_behind_a_stored_prefix(
    tmp_path: Path, family: str, form: str
) -> None:
    folder = build(tmp_path / "m", family, dtype="float32" if form == "4bit" else form)
    if form == "4bit":
        quantise(folder, family, dtype="bfloat16")
    model = equipped(load_text(folder, LoadOptions()))
    how: dict[str, Any] = {"max_chunk": 64, "grid": 32 if family == "qwen3_5_text" else 1}
    alone = [scored(new_engine(model, **how), new_scoring([each]))[0][0] for each in PROMPTS]
    for prompt, score in zip(PROMPTS, alone, strict=True):
        logits = model.model(mx.array([prompt]))[0, -1].astype(mx.float32)
        wanted = mx.softmax(logits[mx.array([YES, NO])])[0].item()
        assert score == pytest.approx(wanted, abs=1e-5 if form == "float32" else 0.02)

    kept = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(model, **how, mixes=True, prefix_cache=kept)
    engine.submit(new_request([40] * 9, max_tokens=60))
    engine.step()
    first, second = new_scoring(PROMPTS), new_scoring(PROMPTS[::-1])
    together = scored(engine, first, second)
    assert [*together[0], *together[1][::-1]] == pytest.approx([*alone, *alone], abs=1e-6)
    assert first.cached + second.cached >= 5 * SHARED
    kept.check_integrity()


def test_the_prefix_cache_gets_the_common_part_and_no_document(tmp_path: Path) -> None:
    model = load_text(build(tmp_path / "m", "qwen3"), LoadOptions())
    kept = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(model, prefix_cache=kept, max_chunk=64)
    scored(engine, new_scoring(PROMPTS))
    whole = kept.nbytes
    for steps in range(1, 8):
        request = new_scoring([[*each[:SHARED], *each] for each in PROMPTS], shared=SHARED)
        engine.submit(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        run(engine)
        kept.check_integrity()
    assert kept.nbytes == whole
    assert not engine.scheduler.waiting
    assert engine.scheduler.live_bytes == 0
    kept.clear()
    assert kept.nbytes == 0
