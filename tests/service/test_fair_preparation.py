"""The work of one tenant before the queue delays no other; none is done for what is too large."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest

from in_process import InProcessClient
from mlx_provider.chat.constraints import trial
from mlx_provider.errors import BadRequest, ContextTooLong
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.serving.service import ChatService

from .conftest import PATIENCE, PLAIN, Tiny

CHAT = [{"role": ("user", "assistant")[i % 2], "content": "Hello there"} for i in range(1001)]


def chat(model: Tiny) -> None:
    model.start(messages=CHAT, salt="mallory").close()


def count(model: Tiny) -> None:
    model.service.count(GenerateRequest(model=model.model, messages=CHAT, salt="mallory"))


def grammar(model: Tiny) -> None:
    """Refused once its process has been ended for the time that it took."""
    endless = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "integer", "multipleOf": 999_983}},
    }
    with pytest.raises(BadRequest, match="to compile"):
        model.start(response_format=endless, salt="mallory")


@pytest.mark.parametrize("work", [chat, count, grammar])
def test_the_work_of_one_account_lets_others_pass(
    shared_service: ChatService, work: Callable[[Tiny], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.3)
    model, ended = Tiny(InProcessClient(shared_service), shared_service, "demo"), Queue[None]()

    def one() -> None:
        work(model)
        ended.put(None)

    one()
    many = 8 if work is grammar else 40  # chats are brief
    with ThreadPoolExecutor(8) as pool:
        flood = [pool.submit(one) for _ in range(many)]
        for _ in range(2):
            ended.get(timeout=PATIENCE)
        # only a grammar waits for grammars: compiling one takes as long as some of the chats
        more = {"response_format": {"type": "json_object"}} if work is grammar else {}
        model.start(salt="alice", **more).close()
        assert ended.qsize() < many - 2, "all others came first"
        for each in flood:
            each.result()


@pytest.mark.parametrize("part", [str, lambda text: [{"type": "text", "text": text}]])
def test_a_text_beyond_the_context_is_refused_before_it_is_rendered(tiny: Any, part: Any) -> None:
    refusal = "{%- if messages[-1].content | length > 9999 %}{{ raise_exception('no') }}{% endif %}"
    model = tiny("qwen3", refusal + PLAIN)
    with pytest.raises(ContextTooLong, match="at least"):
        model.start(messages=[{"role": "user", "content": part("a word " * 200_000)}])
    with pytest.raises(BadRequest, match="no"):
        model.start(messages=[{"role": "user", "content": part(" " * 10_000)}])
