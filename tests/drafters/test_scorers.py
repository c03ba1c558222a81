"""Who is scored, what a scorer may do, and what others see of it."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.families.text import TextModel
from mlx_provider.records import MediaSpan, Prompt
from mlx_provider.testing.driver import Alternating, new_request, run
from stepping import step_until, submit

from .scores import LEAST, Scripted, thinning


def text(length: int, seed: int = 0) -> list[int]:
    return [20 + (i * i * 31 + i // 7 + 101 * seed) % 300 for i in range(length)]


def plain(model: TextModel, tokens: Sequence[int], count: int = 8) -> list[int]:
    engine = thinning(model)
    engine.sparse_prefill = None
    request = new_request(list(tokens), max_tokens=count)
    run(engine, request)
    return request.rows[0].tokens


def ticking(engine: Any, seconds: float) -> None:
    """Each look at the clock of a scoring takes so long."""
    times = itertools.count()
    engine.sparse_prefill.clock = lambda: seconds * next(times)


# -- scorers that fail


class Raising(Scripted):
    def scoring(self, tokens: Sequence[int]) -> Any:
        raise RuntimeError("no scorer today")


class RaisingLater(Scripted):
    def scores(self, tokens: Sequence[int]) -> Any:
        raise SystemExit("no scores")


class Unreadable(Scripted):
    @property
    def longest_scored(self) -> int:  # type: ignore[override]
        raise OSError("unreadable")


def saying(scores: Callable[[int], Any]) -> Scripted:
    class Saying(Scripted):
        def scores(self, tokens: Sequence[int]) -> Any:
            return scores(len(tokens))

    return Saying()


@pytest.mark.parametrize(
    "scorer",
    [
        Raising(),
        RaisingLater(),
        Unreadable(),
        saying(lambda n: np.ones(n - 1)),
        saying(lambda n: np.full(n, np.nan)),
        saying(lambda n: "all of it"),
        saying(lambda n: 7),
        saying(lambda n: None),  # it comes to no end
    ],
)
def test_a_failed_or_invalid_scorer_makes_the_prompt_prefill_whole(
    qwen3: TextModel, scorer: Scripted
) -> None:
    request, short = new_request(text(300)), new_request(text(30))
    run(thinning(qwen3, scorer), request, short)
    assert request.prefilling == "prefilled whole: the scorer failed"
    assert (request.selected, request.prefilled_tokens) == (None, 300)
    assert request.rows[0].tokens == plain(qwen3, text(300))
    assert short.rows[0].tokens == plain(qwen3, text(30))


def test_a_scorer_that_failed_twice_is_not_called_again(qwen3: TextModel) -> None:
    class Counting(RaisingLater):
        pass

    scorer, requests = Counting(), [new_request(text(300, i)) for i in range(5)]
    run(thinning(qwen3, scorer), *requests)
    assert scorer.begun == 2
    assert requests[-1].prefilling == "prefilled whole: the scorer keeps failing"


# -- who is not scored


def test_short_prompts_and_requests_without_skipping_are_prefilled_whole(qwen3: TextModel) -> None:
    scorer = Scripted()
    requests = [new_request(text(LEAST - 1)), new_request(text(400), may_skip=False)]
    run(thinning(qwen3, scorer), *requests)
    assert scorer.begun == 0
    assert [each.skipped_tokens for each in requests] == [0, 0]
    assert [each.prefilling for each in requests] == ["", ""]


def test_a_prompt_longer_than_the_scorer_can_read_is_prefilled_whole(qwen3: TextModel) -> None:
    class Near(Scripted):
        longest_scored = 299

    request = new_request(text(300))
    run(thinning(qwen3, Near()), request)
    assert request.prefilling == "prefilled whole: of 300 tokens, 299 at most can be scored"


@pytest.mark.parametrize(
    "more", [{"spans": [MediaSpan(3, 9, "an image", None)]}, {"rope_delta": 4}, {"positions": 1}]
)
def test_a_prompt_with_media_is_prefilled_whole(qwen3: TextModel, more: dict[str, Any]) -> None:
    request = new_request(text(300))
    request.prompt = Prompt(text(300), **more)
    engine = thinning(qwen3)
    job = engine.scheduler.submit(request, 0.0)
    engine.sparse_prefill.begin(job, 0)
    assert job.uses_prefix_cache
    assert request.prefilling == "prefilled whole: it has media"


# -- the prefix cache


def test_a_prompt_with_a_long_cached_prefix_is_prefilled_whole(qwen3: TextModel) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    engine = thinning(qwen3, prefix_cache=kept)
    first, second = new_request(text(200)), new_request(text(600))
    run(engine, first)
    run(engine, second)
    assert second.selected is None
    assert second.prefilling == "prefilled whole: 200 of its 600 tokens were cached"
    assert second.rows[0].tokens == plain(qwen3, text(600))


def test_a_short_cached_prefix_does_not_prevent_sparse_prefill(qwen3: TextModel) -> None:
    fresh, cached = new_request(text(600)), new_request(text(600))
    run(thinning(qwen3), fresh)
    engine = thinning(qwen3, prefix_cache=PrefixCache(budget=lambda: 2**24))
    run(engine, new_request(text(50)))
    run(engine, cached)
    assert (cached.cached_tokens, cached.selected) == (0, fresh.selected)
    assert cached.rows[0].tokens == fresh.rows[0].tokens


@pytest.mark.parametrize("cancelled", ["", "scored", "prefilled", "decoding"])
def test_a_sparse_prompt_is_never_stored_in_the_prefix_cache(
    qwen3: TextModel, cancelled: str
) -> None:
    """Neither in memory nor on disk, wherever it ends."""
    written: list[Any] = []
    kept = PrefixCache(budget=lambda: 2**24)
    kept.insert = lambda *args, **more: written.append(args)  # type: ignore[method-assign]
    engine = thinning(qwen3, Scripted(40), prefix_cache=kept, max_chunk=32)
    ticking(engine, 0.3)
    request = new_request(text(600), max_tokens=40)
    engine.submit(request)
    stages = {
        "scored": lambda: any(job.scoring for job in engine.scheduler.waiting),
        "prefilled": lambda: request.prefilled_tokens >= 64,
        "decoding": lambda: len(request.rows[0].tokens) > 20,
        "": lambda: False,
    }
    while not engine.idle:
        engine.step()
        if request.phase.value != "done" and stages[cancelled]():
            engine.cancel(request)
    assert not written
    assert (request.selected is None) == (cancelled == "scored")


def test_a_whole_prompt_does_not_wait_for_the_prefix_of_a_sparse_one(qwen3: TextModel) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    engine = thinning(qwen3, Scripted(9), prefix_cache=kept, max_chunk=32)
    ticking(engine, 0.3)
    sparse, whole = new_request(text(900)), new_request(text(700), may_skip=False)
    submit(engine, sparse, steps=1)
    submit(engine, whole, steps=1)
    assert [job.admitted for job in engine.scheduler.waiting] == [True, True]
    run(engine)
    assert whole.cached_tokens == 0
    assert whole.rows[0].tokens == plain(qwen3, text(700))
    assert sparse.selected is not None


def test_a_preempted_row_that_was_prefilled_whole_is_not_scored(qwen3: TextModel) -> None:
    class OnceFailing(Scripted):
        def scores(self, tokens: Sequence[int]) -> Any:
            return super().scores(tokens) if self.begun > 1 else 7

    room = [10**9]
    scorer = OnceFailing()
    engine = thinning(qwen3, scorer, reserve=4, available=lambda: room[0])
    request, other = new_request(text(300), max_tokens=20), new_request(text(20), max_tokens=40)
    request.arrived = 1.0  # the younger one
    submit(engine, other, steps=1)
    engine.submit(request)
    step_until(engine, lambda: len(request.rows[0].tokens) >= 6)
    room[0] = 600
    engine.step()
    assert engine.scheduler.queued_jobs
    room[0] = 10**9
    run(engine)
    assert scorer.begun == 1
    assert request.rows[0].tokens == plain(qwen3, text(300), 20)


# -- beside others


def test_rows_decode_between_the_pieces_of_a_scoring(qwen3: TextModel) -> None:
    now = [0.0]

    class Slow(Scripted):
        """A piece takes 40 ms."""

        def scoring(self, tokens: Sequence[int]) -> Any:
            inner = super().scoring(tokens)
            advance = inner.advance

            def slowly() -> Any:
                now[0] += 0.04
                return advance()

            inner.advance = slowly  # type: ignore[method-assign]
            return inner

    engine = thinning(qwen3, Slow(20), scheduler=Alternating, clock=lambda: now[0])
    assert engine.sparse_prefill is not None
    engine.sparse_prefill.clock = lambda: now[0]
    stream, long = new_request(text(20), max_tokens=60), new_request(text(600), max_tokens=4)
    engine.submit(stream)
    step_until(engine, lambda: len(stream.rows[0].tokens) >= 5)
    engine.submit(long)
    gaps = []
    while long.prefilled_tokens == 0:
        before, tokens = now[0], len(stream.rows[0].tokens)
        engine.step()
        gaps.append(now[0] - before)
        assert len(stream.rows[0].tokens) > tokens - 1
    assert max(gaps) <= 0.1
    assert sum(gaps) == pytest.approx(0.8)
    assert len(stream.rows[0].tokens) >= len(gaps)
    run(engine)
    assert long.selected is not None


def test_a_prompt_without_other_rows_is_scored_in_few_steps(qwen3: TextModel) -> None:
    engine, request = thinning(qwen3, Scripted(25)), new_request(text(600))
    ticking(engine, 0.03)  # once for a piece
    engine.submit(request)
    steps = 0
    while request.selected is None:
        engine.step()
        steps += 1
    assert steps == 2, "16 pieces are half a second"


def test_the_log_reports_kept_tokens(qwen3: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    request = new_request(text(600))
    with caplog.at_level(logging.INFO):
        run(thinning(qwen3), request)
    assert f"sparse: {600 - request.skipped_tokens} of 600 prompt tokens were kept" in caplog.text
    assert f"prefill {600 - request.skipped_tokens} new / 0 cached tokens" in caplog.text


def test_a_sparse_row_reserves_memory_for_its_kept_tokens_only(qwen3: TextModel) -> None:
    engine = thinning(qwen3, share=0.2, reserve=8)
    ticking(engine, 0.3)
    request = new_request(text(2048), max_tokens=8)
    submit(engine, request, steps=1)
    assert engine.scheduler.live_bytes >= 2048
    step_until(engine, lambda: request.selected is not None)
    assert engine.scheduler.live_bytes < 600
    step_until(engine, lambda: engine.scheduler.running)
    (row,) = engine.scheduler.running
    assert engine.batch.layout.extract(row)[0].keys.shape[2] < 1024
