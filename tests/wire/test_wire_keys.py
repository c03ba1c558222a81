"""An engine with several keys: what the holder of a named one sees and does."""

import uuid
from typing import Any

import httpx
import pytest

from mlx_provider.server.access import Key


def cached(client: httpx.Client, model: str, said: str) -> int:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": said}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def read(client: httpx.Client, model: str, said: str) -> int:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": said}]}
    answer = client.post("/v1/messages", json=body)
    return int(answer.json()["usage"]["cache_read_input_tokens"])


def generated(client: httpx.Client, model: str, said: str, **more: Any) -> int:
    """Cached tokens of a request in the protocol of our gateway."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": said}]}
    answer = client.post("/v1/generate", json={**body, **more})
    assert answer.status_code == 200, answer.text
    return int(answer.text.partition('"cached_tokens":')[2].partition(",")[0].rstrip("}] \n"))


def prompt() -> str:
    """One that no test has sent. Prompts of one model share the first words of its template."""
    return uuid.uuid4().hex + " word" * 200


def test_keys_do_not_share_cached_prompts(engine: Any) -> None:
    said = prompt()
    assert cached(engine.alice, engine.scripted, said) < 20
    assert cached(engine.bob, engine.scripted, said) < 20
    assert cached(engine.http, engine.scripted, said) < 20
    assert cached(engine.alice, engine.scripted, said) > 200
    said = prompt()
    assert read(engine.alice, engine.scripted, said) < 20
    assert read(engine.bob, engine.scripted, said) < 20
    assert read(engine.alice, engine.scripted, said) > 200


def test_a_named_key_cannot_use_the_tenant_of_another_key(engine: Any) -> None:
    said = prompt()
    assert generated(engine.alice, engine.scripted, said, salt="gateway's") < 20
    for forged in ("gateway's", "key alice:gateway's", "remote:key alice:gateway's"):
        assert generated(engine.bob, engine.scripted, said, salt=forged) < 20
    assert generated(engine.alice, engine.scripted, said) < 20
    assert generated(engine.alice, engine.scripted, said, salt="gateway's") > 200


def test_a_named_key_is_one_account_with_one_share() -> None:
    fields = Key("x" * 16, "alice").sender_fields("of a gateway")
    own = {"salt": "key alice:of a gateway", "tenant": "key alice:", "share": 1.0}
    assert fields == {"origin": "named", **own}
    assert Key("x").sender_fields("of a gateway") == {"origin": "remote"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/cache"), ("GET", "/cache"), ("GET", "/metrics"), ("GET", "/v1/stats")],
)
def test_a_named_key_cannot_use_routes_of_the_whole_engine(
    engine: Any, method: str, path: str
) -> None:
    with engine.alice.stream(method, path) as answer:
        assert answer.status_code == 403
        assert "a named key may not use this route" in answer.read().decode()
    with engine.http.stream(method, path) as answer:
        assert answer.status_code == 200


def test_a_named_key_does_not_see_the_load(engine: Any) -> None:
    seen, known = (client.get("/health").json() for client in (engine.alice, engine.http))
    assert seen["active_memory"] == seen["running"] == seen["queued"] == 0
    assert known["active_memory"] > 0
    assert seen["models"] == known["models"]
    with engine.alice.stream("GET", "/v1/attach") as attached:
        assert '"active_memory":0,' in next(attached.iter_lines())


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"options": {"trust_remote_code": True}}, 403),
        ({"options": {"adapter": "/tmp/adapter"}}, 403),
        ({"options": {"keep_alive": -1}}, 403),
        ({"options": {"drafter": "off"}}, 403),
        ({"options": {"kv_bits": 8}}, 403),
        ({"options": {"reproducible": True}}, 403),
        ({"options": {"sparse_prefill": 0.123}}, 403),
        ({"options": {"context_length": 10**12}}, 400),
        ({"template": {"chat_template": "x"}}, 400),
        ({"model": "/etc", "origin": "owner"}, 404),
    ],
)
def test_a_named_key_can_choose_the_options_of_any_key_on_tcp(
    engine: Any, more: dict[str, Any], status: int
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for client in (engine.http, engine.alice):
        assert client.post("/v1/generate", json={**body, **more}).status_code == status


@pytest.mark.parametrize(
    "options",
    [{"warm": ["A prompt for others to wait for."]}, {"tool_parser": "hermes"}],
    ids=lambda options: next(iter(options)),
)
def test_a_named_key_cannot_set_costly_options(engine: Any, options: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = engine.alice.post("/v1/generate", json={**body, "options": options})
    assert answer.status_code == 403
    assert f"{next(iter(options))} cannot be set with a named key" in answer.text


def test_a_named_key_cannot_add_names_of_a_model_to_the_list(engine: Any) -> None:
    def ids() -> list[str]:
        return sorted(each["id"] for each in engine.http.get("/v1/models").json()["data"])

    def ask(model: str, **options: Any) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = engine.alice.post("/v1/generate", json={**body, "options": options})
        return int(answer.status_code)

    assert ask(engine.scripted) == 200
    before = ids()
    assert [ask(engine.scripted, context_length=length) for length in range(900, 910)] == [200] * 10
    assert ask(engine.scripted, context_length=5) == 400
    head, _, name = engine.scripted.rpartition("/")
    assert {ask(f"{head}/{way}{name}") for way in ("./", "/", "../models/")} == {404}
    assert ids() == before
