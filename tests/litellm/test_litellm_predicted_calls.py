"""Calls that a client leaves to the model are drafted from their marker on, by either way in."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import litellm
import pytest

from mlx_provider.chat.constraints import call_text
from mlx_provider.engine.speculation import speculation
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.server.app import EngineApp
from mlx_provider.server.connections import listen_unix
from mlx_provider.server.process import EngineServer, LoopDelivery
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from waiting import PATIENCE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
CALLED, NOT_CALLED = "What is the weather in Paris?", "Say: BANANA"


def asked(text: str) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"messages": said, "tools": TOOLS, "tool_choice": "auto", "temperature": 0}


async def by_http(client: httpx.AsyncClient, socket: Path, text: str) -> dict[str, Any]:
    body = {"model": "demo", **asked(text)}
    reply = await client.post("/v1/chat/completions", json=body)
    answer: dict[str, Any] = reply.json()
    return answer


async def by_litellm(client: httpx.AsyncClient, socket: Path, text: str) -> dict[str, Any]:
    reply = await litellm.acompletion(model="mlx/demo", api_base=f"unix:{socket}", **asked(text))
    answer: dict[str, Any] = reply.model_dump()
    return answer


WAYS = (by_http, by_litellm)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Path]:
    """The socket of an engine in this process whose demo drafts what grammars force, else
    nothing."""
    models = folder / "models.toml"
    models.write_text('[demo]\ndrafter = "grammar"\n')
    models.chmod(0o600)
    settings = EngineSettings(models_file=models, measurements="off")
    service = ChatService(settings, LoopDelivery(asyncio.get_running_loop()))
    ready, socket = asyncio.Event(), folder / "s"
    server = EngineServer(EngineApp(service), service, listen_unix(socket), ready.set)
    running = asyncio.create_task(server.run_until_stopped(None))
    await ready.wait()
    try:
        yield socket
    finally:
        server.stop()
        await asyncio.wait_for(running, PATIENCE)


class AtAnyCost(Policy):
    """Takes what is predicted, whatever passes cost."""

    def known_drafts(self, chances: Sequence[float], rows: int, seconds: Any) -> int:
        return min(len(chances), self.most)


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is predicted depends on no time: nor on when a grammar is compiled."""
    submit = call_text._submit
    monkeypatch.setattr(call_text, "_submit", lambda pool, make: submit(None, make))
    monkeypatch.setattr(speculation, "Policy", AtAnyCost)


@pytest.mark.usefixtures("no_clock")
async def test_a_call_chosen_by_the_model_is_drafted_through_every_route() -> None:
    with tempfile.TemporaryDirectory(prefix="mlxp") as name:
        async with served(Path(name)) as socket:
            transport = httpx.AsyncHTTPTransport(uds=str(socket))
            client = httpx.AsyncClient(transport=transport, base_url="http://e", timeout=PATIENCE)
            async with client:
                held = [held_in(await ask(client, socket, CALLED)) for ask in WAYS]
                assert [held_in(await ask(client, socket, NOT_CALLED)) for ask in WAYS] == [0, 0]
                metrics = (await client.get("/metrics")).text
    assert min(held) > 10
    for name in ("drafted", "accepted"):
        assert f"mlx_provider_tokens_{name}_total {sum(held)}.0" in metrics


def held_in(answer: dict[str, Any]) -> int:
    """Drafts that held, of a call of 20 tokens. None was wrong."""
    (choice,), usage = answer["choices"], answer["usage"]
    counts = usage["completion_tokens_details"]
    held: int = counts["accepted_prediction_tokens"]
    assert counts["rejected_prediction_tokens"] == 0
    assert usage["completion_tokens"] == (20 if choice["finish_reason"] == "tool_calls" else 2)
    return held
