"""What `mlx-provider demo` asks of the shipped model as an OpenAI client, with an engine and a
proxy of its own, and whether the answers are right."""

import base64
import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..gateway.config import proxy_config
from ..gateway.engine import SeparateGateway, separate_gateway, warm_up

MODEL = "demo"
Message = dict[str, Any]
Show = Callable[[str], None]
STREAMED = "Tell me a story."
RECALL, NAME = "What is my name?", "Maria"
SEEN, PICTURE = "What is this?", "red circle"
AT_ONCE = {
    "What is the capital of France?": "Paris",
    "Count from 1 to 5.": "1, 2, 3, 4, 5",
    "Say: BANANA": "BANANA",
}


@contextmanager
def stage(environ: Mapping[str, str] = os.environ) -> Iterator[SeparateGateway]:
    """Start proxy and engine of the demo alone, and end them with the block. Raises `NotInstalled`
    or `EngineUnavailable` if one cannot start."""
    with separate_gateway(proxy_config(MODEL, MODEL), environ) as running:
        warm_up(running.engine, MODEL)
        running.proxy.wait_ready()
        yield running


@dataclass(frozen=True)
class Check:
    claim: str
    answer: str
    passed: bool


class Scenario:
    """Runs against an OpenAI-compatible server; `client` is an `openai.OpenAI`."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._request = {"model": model, "temperature": 0, "max_tokens": 200}

    def story(self, show: Show) -> Check:
        """Stream a long answer; `show` gets every piece as it comes."""
        text, finish = self._stream([_user(STREAMED)], show)
        whole = self._ask([_user(STREAMED)])
        same = bool(text) and text == whole and finish == "stop"
        return Check("the same text streamed and in one piece", whole, same)

    def recall(self, show: Show) -> Check:
        """Two turns of one conversation: the second needs the first."""
        turns = [_user(f"My name is {NAME}.")]
        turns += [{"role": "assistant", "content": self._ask(turns)}, _user(RECALL)]
        text, _ = self._stream(turns, show)
        return Check(f"{RECALL} {NAME}", text, NAME in text)

    def at_once(self) -> list[Check]:
        """Three requests at the same time, each answered as if it were alone."""
        with ThreadPoolExecutor(len(AT_ONCE)) as pool:
            answers = list(pool.map(lambda question: self._ask([_user(question)]), AT_ONCE))
        return [
            Check(f"{question} {wanted}", answer, wanted in answer)
            for (question, wanted), answer in zip(AT_ONCE.items(), answers, strict=True)
        ]

    def see(self) -> Check:
        image = {"type": "image_url", "image_url": {"url": red_circle()}}
        answer = self._ask([_user([image, {"type": "text", "text": SEEN}])])
        return Check(f"{SEEN} a {PICTURE}", answer, PICTURE in answer)

    def _ask(self, messages: list[Message]) -> str:
        reply = self._client.chat.completions.create(messages=messages, **self._request)
        return reply.choices[0].message.content or ""

    def _stream(self, messages: list[Message], show: Show) -> tuple[str, str]:
        text, finish = "", ""
        create = self._client.chat.completions.create
        for chunk in create(messages=messages, **self._request, stream=True):
            for choice in chunk.choices:
                show(choice.delta.content or "")
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        return text, finish


def red_circle() -> str:
    """A PNG as a data URL: 96 x 96 pixels, a red circle on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (96, 96), (255, 255, 255))
    ImageDraw.Draw(image).ellipse([12, 12, 84, 84], fill=(215, 30, 35))
    written = io.BytesIO()
    image.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
