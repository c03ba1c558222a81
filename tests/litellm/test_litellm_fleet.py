"""Several engines under one name: a real router of LiteLLM's, as `init --engine` sets it up."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

import litellm
import pytest
from litellm.caching.affinity_cache import set_local_affinity_pin
from litellm.types.router import Deployment, LiteLLM_Params

from mlx_provider.errors import BadRequest, ContextTooLong, EngineUnavailable, Overloaded
from mlx_provider.gateway.config import Served
from mlx_provider.gateway.fleet import Fleet, fleet_config
from mlx_provider.litellm.fleet import head, kept_together
from mlx_provider.protocol.events import Delta, ErrorBody, Failed, Finish

ENGINES = tuple(f"http://mac-{n}.invalid:8080" for n in (1, 2, 3))
AGENT = {"role": "system", "content": "You are an agent."}


def conversation(number: int, *more: str) -> list[dict[str, str]]:
    texts = [f"question {number}", *more]
    roles = ("user", "assistant")
    return [AGENT, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]


class Routed:
    """A router over the fake engine, which knows where each request went."""

    def __init__(self, engine, router: litellm.Router) -> None:
        self.engine = engine
        self.router = router
        self.dead: dict[str, Exception] = {}
        engine.refuse = lambda request: self.dead.get(engine.addresses[-1][0])

    async def ask(self, messages, model="m", **more) -> list[str]:
        """The engines that were asked, in their order; the last one answered."""
        before = len(self.engine.addresses)
        reply = await self.router.acompletion(model=model, messages=messages, **more)
        assert reply.choices[0].message.content == "Hello world!"
        return [address for address, _ in self.engine.addresses[before:]]

    def counts(self) -> list[int]:
        """Requests that the router takes to be running, by engine."""
        store = self.router.leastbusy_logger.router_cache.in_memory_cache.cache_dict
        return [count for name, count in store.items() if "_request_count:" in name]

    def back(self, address: str) -> None:
        """It answers again, and its time out is over."""
        del self.dead[address]
        self.router.cooldown_cache.in_memory_cache.flush_cache()


@pytest.fixture
def routed(engine):
    config = fleet_config(Served("m", "some/model", 4096, 64), Fleet(ENGINES))
    router = litellm.Router(model_list=config["model_list"], **config["router_settings"])
    yield Routed(engine, router)
    router.discard()


async def test_a_conversation_stays_with_its_engine_and_conversations_are_spread(routed):
    first = {n: await routed.ask(conversation(n)) for n in range(24)}
    for n, (place,) in first.items():
        for turn in (("answer", "more"), ("answer", "more", "again", "still")):
            assert await routed.ask(conversation(n, *turn)) == [place]
    counts = Counter(place for (place,) in first.values())
    assert counts.keys() == set(ENGINES)
    assert max(counts.values()) < 16


async def test_where_nothing_runs_sessions_are_spread_alike_by_every_proxy(routed):
    entries = [each for each in routed.router.model_list if each["model_name"] == "m"]
    first = [(await kept_together("m", entries, conversation(n), {}))[0] for n in range(24)]
    again = [(await kept_together("m", entries[::-1], conversation(n), {}))[0] for n in range(24)]
    assert first == again
    assert {each["litellm_params"]["api_base"] for each in first} == set(ENGINES)


async def test_the_clients_own_name_for_a_session_decides(routed):
    for place in ({"session_id": "one"}, {"session_id": "two"}):
        asked = [await routed.ask(conversation(n), metadata=dict(place)) for n in range(6)]
        assert len({tuple(each) for each in asked}) == 1
    keyed = [await routed.ask(conversation(n), prompt_cache_key="mine") for n in range(6)]
    assert len({tuple(each) for each in keyed}) == 1


async def test_who_does_not_answer_is_left_and_its_sessions_move_for_good(routed):
    first = {n: (await routed.ask(conversation(n)))[0] for n in range(9)}
    lost = first[0]
    moved = [n for n, place in first.items() if place == lost]
    routed.dead[lost] = EngineUnavailable(f"no engine answers at {lost}")
    found = await routed.ask(conversation(0))
    assert found[0] == lost
    assert len(found) == 2, "the next engine is asked at once, and answers"
    assert await routed.ask(conversation(0)) == found[1:], "the session stays where it went"
    for n in moved[1:]:
        assert lost not in await routed.ask(conversation(n))
    for n in first.keys() - set(moved):
        assert await routed.ask(conversation(n)) == [first[n]], "others stay"
    routed.back(lost)
    assert await routed.ask(conversation(0)) == found[1:]
    new = [await routed.ask(conversation(100 + n)) for n in range(24)]
    assert [lost] in new, "who is back gets new sessions"


async def test_more_sessions_than_the_routers_cache_has_items_keep_their_engines(routed):
    """LiteLLM makes that cache for 200. Their first choice comes back meanwhile."""
    (away,) = await routed.ask(conversation(0))
    routed.dead[away] = EngineUnavailable(f"no engine answers at {away}")
    where = (await routed.ask(conversation(0)))[-1]
    routed.back(away)
    for n in range(210):  # as of so many other sessions
        set_local_affinity_pin(routed.router.cache, f"pin {n}", {"model_id": away}, 3600)
    assert where != away
    assert await routed.ask(conversation(0)) == [where]


async def test_a_full_engine_hands_on_a_request_and_keeps_its_other_sessions(routed):
    first = {n: (await routed.ask(conversation(n)))[0] for n in range(12)}
    full = first[0]
    routed.dead[full] = Overloaded("the queue is full")
    assert (await routed.ask(conversation(0)))[:-1] == [full]
    routed.dead.clear()
    assert full not in await routed.ask(conversation(0))
    stayed = [n for n, place in first.items() if place == full and n]
    assert stayed
    for n in stayed:
        assert await routed.ask(conversation(n)) == [full]


async def test_a_request_that_is_wrong_is_asked_of_one_engine_only(routed):
    routed.dead = dict.fromkeys(ENGINES, BadRequest("no such thing"))
    for _ in range(3):
        with pytest.raises(litellm.BadRequestError):
            await routed.ask(conversation(0))
    assert len(routed.engine.requests) == 3
    routed.dead.clear()
    assert len(await routed.ask(conversation(0))) == 1


async def test_names_with_a_star_pin_their_sessions_too(routed):
    turns = ((), ("answer", "more"), ("answer", "more", "again", "still"))
    for n in range(3):
        asked = [await routed.ask(conversation(n, *turn), model="claude-x") for turn in turns]
        assert len({tuple(each) for each in asked}) == 1


async def test_groups_without_our_entries_and_without_affinity_are_left_alone(engine):
    other = {"model": "openai/x", "api_key": "k", "mock_response": "hi"}
    entries = [
        {"model_name": "cloud", "litellm_params": {**other, "api_base": f"http://{n}.invalid"}}
        for n in (1, 2)
    ]
    ours = {"model_name": "m", "litellm_params": {"model": "mlx/m"}}
    router = litellm.Router(model_list=[*entries, ours])
    for name in ("cloud", "m"):
        metadata: dict[str, str] = {}
        await router.acompletion(model=name, messages=conversation(1), metadata=metadata)
        assert "session_id" not in metadata
    router.discard()


@pytest.mark.parametrize(
    ("messages", "request_", "same"),
    [
        (conversation(1, "a", "b"), {}, True),
        (conversation(1), {"tools": [{"type": "function"}]}, True),
        (conversation(2), {}, False),
        ([{"role": "system", "content": "Another."}, *conversation(1)[1:]], {}, False),
        (conversation(1), {"system": "of /v1/messages"}, False),
        (conversation(1), {"instructions": "of /v1/responses"}, False),
    ],
)
def test_a_conversation_is_known_by_its_head(messages, request_, same):
    assert (head(messages, request_) == head(conversation(1), {})) is same


def test_an_odd_head_has_a_name_too():
    odd = ["text", 3, None, {"content": b"\xff"}, {"role": "user", "content": "\ud800"}]
    names = {head([each], {}) for each in odd} | {head([], {})}
    assert len(names) == 6


@pytest.mark.parametrize("how", ["leaves", "is cancelled", "fails", "ends"])
async def test_a_request_counts_as_long_as_it_runs_and_no_longer(routed, how, scripted):
    """Two on one engine; what becomes of the first leaves the second counted."""
    engine, gone = routed.engine, Failed(error=ErrorBody(code="request_failed", message="failed"))
    long = [[Delta(content="x")]] * 400
    end = [gone] if how == "fails" else [Finish(reason="stop"), scripted["done"]()]
    scripts = iter([[long[0], end] if how in ("fails", "ends") else long, long])
    engine.script, engine.pause = lambda request: next(scripts), 0.01

    def asked(**more):
        metadata = {"session_id": "one"}
        return routed.router.acompletion("m", conversation(1), metadata=metadata, **more)

    if how == "is cancelled":
        first = asyncio.create_task(asked())
        await until(lambda: sum(routed.counts()) == 1)
    else:
        first = await asked(stream=True)
    second = await asked(stream=True)
    await anext(second)
    assert max(routed.counts()) == 2
    with suppress(asyncio.CancelledError, litellm.InternalServerError):
        if how == "is cancelled":
            first.cancel()
            await first
        else:
            async for _ in first:
                if how == "leaves":
                    break
            await first.aclose()
    await until(lambda: sum(routed.counts()) == 1)
    await asyncio.sleep(0.1)
    assert sum(routed.counts()) == 1, "counted down once"
    await second.aclose()
    await until(lambda: sum(routed.counts()) == 0)


@pytest.mark.parametrize("how", ["answer", "stream", "vectors"])
async def test_a_request_that_litellm_drops_unread_counts_no_more(routed, how):
    """Its client leaves while an engine loads the model, say; then it is accepted, for nobody."""
    may_go = threading.Event()
    routed.engine.refuse = lambda request: may_go.wait(60) and None
    if how == "vectors":
        params = LiteLLM_Params(model="mlx/vectors")
        routed.router.add_deployment(Deployment(model_name="vectors", litellm_params=params))
        asked = routed.router.aembedding("vectors", ["some text"])
    else:
        asked = routed.router.acompletion("m", conversation(1), stream=how == "stream")
    first = asyncio.create_task(asked)
    await until(lambda: routed.engine.requests and sum(routed.counts()) == 1)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    may_go.set()
    await until(lambda: sum(routed.counts()) == 0)
    await until(lambda: not routed.engine.active)


async def until(found):
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.01)


async def test_what_no_engine_may_take_another_model_answers(engine):
    """`--fallback`: where every engine is gone, and where a prompt is too long for them."""
    fleet = Fleet(ENGINES, ("mlx/large",))
    config = fleet_config(Served("m", "small", 4096, 64), fleet)
    router = litellm.Router(model_list=config["model_list"], **config["router_settings"])
    for error in (ContextTooLong("too long"), EngineUnavailable("gone")):
        engine.refuse = lambda request, e=error: e if request.model == "small" else None
        await router.acompletion(model="m", messages=conversation(1))
        assert engine.request.model == "large"
    router.discard()
