"""A LiteLLM proxy in an environment without any package of ours, in front of an engine."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from mlx_provider.gateway.config import START
from mlx_provider.gateway.proxy import FOREIGN
from mlx_provider.testing.scripted import Call, Step, script
from ports import free_port
from sdk_clients import anthropic_client, openai_client
from waiting import wait_for_proxy, wait_until

pytestmark = pytest.mark.stock

PROVIDERS = ("openai", "hosted_vllm", "anthropic")
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CALLS = (Call("look", {"at": "a"}), Call("look", {"at": "b"}))
ALL = Step("Here it is.", CALLS, think="Hm.")
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
PAGE = Path(__file__).parents[2] / "docs" / "litellm.md"
STOCK = r"## Two ways to an engine.*?```yaml\n(.*?)```"
KEY = "sk-stock"
FAKE = Path(__file__).parents[1] / "server" / "fake_engine.py"


@dataclass(frozen=True)
class Proxy:
    url: str
    key: str
    fake: httpx.Client
    """An engine that does what a prompt says, for failures; its model is `fake-PROVIDER`."""

    @property
    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=300)

    def openai(self) -> openai.OpenAI:
        return openai_client(self.url, self.key)

    def anthropic(self) -> Any:
        return anthropic_client(self.url, self.key)


@pytest.fixture(scope="module")
def stock(installed: Callable[..., Path]) -> Path:
    folder = installed(f"litellm[proxy]=={version('litellm')}")
    listed = subprocess.run([folder / "pip", "list"], check=True, capture_output=True, text=True)
    assert "litellm" in listed.stdout
    assert "mlx" not in listed.stdout
    return folder


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = {"MLX_PROVIDER_API_KEY": "the-key"}
    with subprocess.Popen(
        [sys.executable, str(FAKE), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **own},
    ) as process:
        url = re.search(r"engine on (\S+)", process.stderr.readline())
        yield url[1]
        process.kill()


@pytest.fixture(scope="module")
def proxy(
    engine: Any, fake: str, stock: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """The configuration of the page, with entries for each provider."""
    folder = tmp_path_factory.mktemp("proxy")
    given = yaml.safe_load(re.findall(STOCK, PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])
    for each in given["model_list"]:
        place = each["litellm_params"]
        place["api_base"] = place["api_base"].replace("http://mac-1:8080", engine.url)
    models = (engine.scripted, "scripted", engine.url), ("demo", "demo", engine.url), (
        "fake", "fake", fake,
    )  # fmt: skip
    given["model_list"] += [entry(provider, *model) for provider in PROVIDERS for model in models]
    (folder / "config.yaml").write_text(json.dumps(given))
    (folder / ".env").write_text(f"LITELLM_MASTER_KEY={KEY}\nENGINE_1_KEY=the-key\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    port = free_port()
    own |= {"PATH": f"{stock}{os.pathsep}{os.environ['PATH']}", "PORT": str(port)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-ec", START], cwd=folder, env=own, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    headers = {"authorization": "Bearer the-key"}
    with process, httpx.Client(base_url=fake, headers=headers, trust_env=False) as http:
        try:
            wait_for_proxy(f"http://127.0.0.1:{port}", process, folder / "log")
            yield Proxy(f"http://127.0.0.1:{port}", KEY, http)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def entry(provider: str, model: str, name: str, url: str) -> dict[str, Any]:
    base = url if provider == "anthropic" else url + "/v1"
    place = {"model": f"{provider}/{model}", "api_base": base, "api_key": "the-key"}
    return {"model_name": f"{name}-{provider}", "litellm_params": place}


def test_every_entry_of_the_generated_config_answers(proxy: Proxy) -> None:
    with proxy.http as http:
        for model, path in (("demo", CHAT), ("gpt-x", CHAT), ("claude-x", MESSAGES)):
            messages = [{"role": "user", "content": "x"}]
            body = {"model": model, "max_tokens": 1, "messages": messages}
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_stock_litellm_passes_chat_with_tools(proxy: Proxy, provider: str, stream: bool) -> None:
    body: Any = {
        "model": f"scripted-{provider}",
        "messages": [{"role": "user", "content": script(ALL)}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    }
    with proxy.openai() as client:
        if not stream:
            reply = client.chat.completions.create(**body)
            (choice,), usage = reply.choices, reply.usage
            content = choice.message.content
            pieces = [(at, c.function) for at, c in enumerate(choice.message.tool_calls or [])]
            reason = choice.finish_reason
        else:  # the SDK's accumulator fails at what LiteLLM makes of Anthropic's thoughts
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.chat.completions.create(**body))
            usage = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
            parts = [choice for chunk in chunks for choice in chunk.choices]
            content = "".join(part.delta.content or "" for part in parts)
            pieces = [(c.index, c.function) for p in parts for c in p.delta.tool_calls or []]
            reason = next(part.finish_reason for part in parts if part.finish_reason)
    calls = {0: "", 1: ""}
    for index, function in pieces:
        calls[index] += function.arguments or ""
    assert content == "Here it is."
    assert [json.loads(each) for each in calls.values()] == [{"at": "a"}, {"at": "b"}]
    assert reason == "tool_calls"
    assert usage.prompt_tokens > 20
    assert usage.completion_tokens > 5


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_stock_litellm_passes_messages_tools(proxy: Proxy, provider: str, stream: bool) -> None:
    body: Any = {
        "model": f"scripted-{provider}",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": script(ALL)}],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    }
    with proxy.anthropic() as client:
        if stream:
            with client.messages.stream(**body) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**body)
    text = "".join(block.text for block in reply.content if block.type == "text")
    calls = [block.input for block in reply.content if block.type == "tool_use"]
    thoughts = "".join(block.thinking for block in reply.content if block.type == "thinking")
    assert (text, calls, thoughts) == ("Here it is.", [{"at": "a"}, {"at": "b"}], "Hm.")
    assert reply.stop_reason == "tool_use"
    assert reply.usage.output_tokens > 5


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_image_reaches_the_model(proxy: Proxy, provider: str) -> None:
    url = {"url": f"data:image/png;base64,{PIXEL}"}
    text = {"type": "text", "text": "x"}
    counts = []
    with proxy.openai() as client:
        for parts in ([text], [text, {"type": "image_url", "image_url": url}]):
            messages: Any = [{"role": "user", "content": parts}]
            reply = client.chat.completions.create(
                model=f"demo-{provider}", messages=messages, max_tokens=1
            )
            counts.append(reply.usage.prompt_tokens)
    assert counts[1] > counts[0]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors_keep_their_status_through_a_stock_litellm(proxy: Proxy, provider: str) -> None:
    with proxy.http as http:
        for path in (CHAT, MESSAGES):
            long, busy = (
                http.post(
                    path,
                    json={
                        "model": f"{model}-{provider}",
                        "max_tokens": 5,
                        "messages": [{"role": "user", "content": said}],
                    },
                )
                for model, said in (("scripted", "ab " * 4000), ("fake", "fail overloaded 4.2"))
            )
            assert long.status_code == 400, long.text
            assert "prompt is too long" in long.text
            assert busy.status_code == 429, busy.text
            if path == CHAT:  # LiteLLM drops it from the errors of messages
                assert busy.headers["llm_provider-retry-after"] == "5"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_disconnected_client_cancels_through_a_stock_litellm(proxy: Proxy, provider: str) -> None:
    body = {
        "model": f"fake-{provider}",
        "max_tokens": 5,
        "stream": True,
        "messages": [{"role": "user", "content": "count 100000 0.1"}],
    }
    before = set(proxy.fake.get("/cache").json()["submitted"])
    with proxy.http as http, http.stream("POST", CHAT, json=body) as answer:
        assert next(answer.iter_lines())
    (name,) = set(proxy.fake.get("/cache").json()["submitted"]) - before
    wait_until(lambda: name in proxy.fake.get("/cache").json()["cancelled"])
