"""A real model behind a real LiteLLM proxy, asked by OpenAI's client."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.engine import warm_up
from mlx_provider.gateway.proxy import start_proxy
from mlx_provider.upstream.detokenizer import byte_of_character
from sdk_clients import openai_client

from .asking import Judge, Model, user
from .conftest import REPOSITORY

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RUN = "from mlx_provider.cli import main; main()"
QUESTIONS = [f"Write one sentence about the number {n}." for n in range(22)]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "population": {"type": "integer"},
        "climate": {"enum": ["warm", "mild", "cold"]},
    },
    "required": ["city", "population", "climate"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["place", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of today", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}},
]


@pytest.fixture(scope="module")
def client(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    config = proxy_config("smollm2", model.folder)
    path = write_config(config, tmp_path_factory.mktemp("proxy"))
    proxy = start_proxy(path, os.environ)
    try:
        warm_up(model.client, model.folder)
        proxy.wait_ready()
        with openai_client(proxy.url, proxy.key, timeout=600) as made:
            yield made
    finally:
        proxy.stop()


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [user(text)],
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


class Ids:
    """Token ids by the bytes that OpenAI's `logprobs` tell."""

    def __init__(self, tokenizer: Any) -> None:
        table = byte_of_character()
        special = set(tokenizer.all_special_ids)
        self._ids = {
            bytes(table[x] for x in piece): token
            for piece, token in tokenizer.get_vocab().items()
            if token not in special
        }

    def of(self, logprobs: Any) -> list[int]:
        return [self._ids[bytes(each.bytes)] for each in logprobs.content]


def test_all_kinds_of_replies_are_those_of_reference(client: openai.OpenAI, judge: Judge) -> None:
    ids = Ids(judge.tokenizer)
    ask = client.chat.completions.create
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        replies = list(pool.map(lambda text: ask(**asked(text, logprobs=True)), QUESTIONS))
    for text, reply in zip(QUESTIONS, replies, strict=True):
        (choice,) = reply.choices
        tokens = ids.of(choice.logprobs)
        values = [each.logprob for each in choice.logprobs.content]
        judge.check([user(text)], tokens, values, stopped=choice.finish_reason == "stop")
        assert judge.tokenizer.decode(tokens) == choice.message.content
    for text, reply in list(zip(QUESTIONS, replies, strict=True))[:4]:
        chunks = list(ask(**asked(text), stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert len(pieces) > 4
        assert "".join(pieces) == reply.choices[0].message.content


def test_a_repeated_prompt_is_reused(client: openai.OpenAI) -> None:
    text = "Tell me about rivers. " * 20
    first, second = (client.chat.completions.create(**asked(text)) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_fits_its_json_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"name": "city", "strict": True, "schema": CITY}
    form = {"type": "json_schema", "json_schema": schema}
    text = "Describe Paris as JSON with city, population and climate."
    reply = client.chat.completions.create(
        **asked(text, response_format=form, max_tokens=120), stream=stream
    )
    if stream:
        content = "".join(c.choices[0].delta.content or "" for c in reply if c.choices)
    else:
        content = reply.choices[0].message.content
    jsonschema.validate(json.loads(content), CITY)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_a_forced_call_names_a_tool_and_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    text = "What is the weather in Paris, in celsius?"
    reply = client.chat.completions.create(
        **asked(text, tools=TOOLS, tool_choice=choice, max_tokens=120), parallel_tool_calls=False
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name in {"weather", "stop"}
    assert choice == "required" or call.function.name == "weather"
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_the_example_chat_script_answers(smollm2: Path) -> None:
    chat = REPOSITORY / "examples" / "smollm2" / "chat.py"
    said = "What is the capital of France? Answer in one word.\nAnd of Italy?\n\n"
    with tempfile.TemporaryDirectory(prefix="mlxp") as runtime:
        environ = {**os.environ, "MLX_PROVIDER_RUNTIME_DIR": runtime}
        command = [sys.executable, os.fspath(chat), os.fspath(smollm2)]
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, timeout=900, env=environ
        )
        subprocess.run([sys.executable, "-c", RUN, "engine", "stop"], env=environ)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "Rome" in done.stdout
