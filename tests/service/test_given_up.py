"""A client that cancels a long prompt and repeats it reuses the computed part."""

import threading
from typing import Any

from mlx_provider.protocol.requests import GenerateRequest
from waiting import wait_until

CHUNK = 64
PASSES = 4
LONG = "word " * 1000


def test_a_repeated_prompt_continues_where_it_was_cancelled(
    make_service: Any, tiny_class: Any, qwen: Any
) -> None:
    service, client = make_service(max_chunk=CHUNK)
    model = tiny_class(client, service, qwen.model)
    whole = qwen.ask(LONG, max_tokens=4).only.content
    engine = model.served().engine
    step, steps, left = engine.step, list[int](), threading.Event()

    def waits_after_some() -> Any:
        steps.append(1)
        if len(steps) > PASSES:
            left.wait(300)
        return step()

    engine.step = waits_after_some
    given_up = model.start(LONG, max_tokens=4)
    wait_until(lambda: len(steps) > PASSES)
    (request,) = client.stats().requests
    given_up.close()
    left.set()
    answer = model.ask(LONG, max_tokens=4)
    assert answer.only.content == whole
    assert answer.usage.prompt_tokens > answer.usage.cached_tokens >= request.prefilled_tokens > 0
    health = client.health()
    assert (health.running, health.queued) == (0, 0), "its twin has ended"


def test_a_count_is_the_prompt_s(qwen: Any) -> None:
    def count(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        found: int = qwen.client.count(GenerateRequest(model=qwen.model, messages=messages))
        return found

    assert count("Hello") == qwen.ask("Hello", max_tokens=1).prompt_tokens
    for beyond in ("word " * 40_000, "a" * 1_500_000):
        assert count(beyond) >= qwen.served().info.context_length
