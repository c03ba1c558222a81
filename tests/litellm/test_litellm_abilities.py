"""LiteLLM knows what our models can, before and after one was loaded; they cost nothing."""

import sys
from types import SimpleNamespace

import litellm
import pytest

from mlx_provider.serving.hub import folder_of

HI = [{"role": "user", "content": "hi"}]
ABLE = (
    "supports_function_calling",
    "supports_parallel_function_calling",
    "supports_response_schema",
    "supports_prompt_caching",
)


@pytest.fixture
def own_map(monkeypatch):
    """LiteLLM's map of models, put back at the end."""
    entries = {name: dict(entry) for name, entry in litellm.model_cost.items()}
    monkeypatch.setattr(litellm, "model_cost", entries)


def router(*entries):
    return litellm.Router(
        model_list=[
            {"model_name": f"m{i}", "litellm_params": {"model": model}, "model_info": dict(info)}
            for i, (model, info) in enumerate(entries)
        ]
    )


def cost_of(reply):
    """What LiteLLM reports of a reply."""
    return reply._hidden_params["response_cost"]


def window(name):
    return litellm.get_model_info(name)["max_input_tokens"]


def listed(made, index):
    return made.get_model_listing_info(f"m{index}").max_input_tokens


@pytest.mark.parametrize("model", ["mlx/demo", "mlx/demo-hybrid"])
def test_the_demo_models_are_registered_with_abilities_and_context(model):
    assert all(getattr(litellm.utils, able)(model=model) for able in ABLE)
    assert litellm.supports_vision(model)
    assert window(model) == 65_536


@pytest.mark.parametrize("model", ["mlx/demo", "mlx/demo-hybrid"])
def test_a_folder_of_the_package_has_the_abilities_that_are_registered(model, own_map):
    folder = folder_of(model.removeprefix("mlx/"))
    router((f"mlx/{folder}", {}))
    entry = litellm.model_cost[f"mlx/{folder}"]
    for name in ("supports_vision", "supports_reasoning", "max_input_tokens"):
        assert entry[name] == litellm.model_cost[model][name]


def test_a_reply_of_an_mlx_model_costs_nothing(engine, own_map):
    reply = litellm.completion(model="mlx/demo", messages=HI)
    assert litellm.completion_cost(reply, model="mlx/demo") == 0
    assert cost_of(reply) == 0
    litellm.completion(model="mlx/org/never-seen", messages=HI)
    assert litellm.completion_cost(reply, model="mlx/org/never-seen") == 0


def test_litellm_knows_context_and_abilities_after_the_first_reply(engine, own_map):
    engine.context_length, engine.vision, engine.reasoning = 7000, True, False
    litellm.completion(model="mlx/org/told", messages=HI)
    assert window("mlx/org/told") == 7000
    assert litellm.supports_vision("mlx/org/told")
    assert not litellm.supports_reasoning("mlx/org/told")
    assert litellm.supports_function_calling("mlx/org/told")


def test_config_entries_of_one_model_list_separate_contexts(own_map):
    made = router(
        ("mlx/demo", {}),
        ("mlx/demo", {"mlx": {"context_length": 900}}),
        ("mlx/demo", {"max_input_tokens": 50}),
    )
    assert [listed(made, index) for index in range(3)] == [65_536, 900, 50]


def test_engines_of_one_model_list_separate_contexts(engine, own_map, monkeypatch):
    made = router(*(("mlx/org/two", info) for info in ({}, {}, {"max_input_tokens": 50})))
    monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", SimpleNamespace(llm_router=made))
    for contexts in ((4096, 131_072, 7000), (2048, 8192, 7000)):
        for index, engine.context_length in enumerate(contexts):
            made.completion(f"m{index}", messages=HI)
        assert [listed(made, index) for index in range(3)] == [*contexts[:2], 50]


def test_abilities_and_prices_set_by_the_operator_are_kept(own_map):
    made = router(("mlx/org/x", {"supports_vision": True, "input_cost_per_token": 2.0}))
    info = made.model_list[0]["model_info"]
    assert info["input_cost_per_token"] == 2
    assert not [name for name in info if "cost" in name and name != "input_cost_per_token"]
    assert litellm.supports_vision("mlx/org/x")


async def test_cached_tokens_cost_as_other_prompt_tokens_unless_a_price_is_set(engine, own_map):
    async def cost(**more):
        info = {"input_cost_per_token": 2.0, "output_cost_per_token": 3.0, **more}
        made = router((f"mlx/org/cached{len(more)}", info))
        reply = await made.acompletion("m0", messages=HI)
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert cached
        return cost_of(reply), reply.usage, cached

    whole, usage, _ = await cost()
    assert whole == 2 * usage.prompt_tokens + 3 * usage.completion_tokens
    less, _, cached = await cost(cache_read_input_token_cost=0.5)
    assert less == whole - 1.5 * cached


def test_a_router_without_prices_logs_no_warning(own_map, monkeypatch):
    told = []
    monkeypatch.setattr(litellm.utils.verbose_logger, "warning", lambda *said: told.append(said))
    router(("mlx/org/priced", {"input_cost_per_token": 0, "output_cost_per_token": 0}))
    made = router(("mlx/org/without", {}))
    assert not [name for name in made.model_list[0]["model_info"] if "cost" in name]
    assert told == []


def test_an_unreadable_model_folder_does_not_stop_the_router(own_map, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    router(("mlx//nowhere", {}), (f"mlx/{tmp_path}", {}), ("mlx/*", {}))
    assert litellm.supports_function_calling("mlx//nowhere")


def test_entries_of_other_providers_are_unchanged(own_map):
    made = router(("openai/gpt-4o", {}))
    assert "cache_read_input_token_cost" not in made.model_list[0]["model_info"]
