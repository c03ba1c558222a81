"""Importing the provider is enough: registration, admitted parameters, no hijacks."""

import importlib

import litellm
import pytest
from litellm.proxy.types_utils.utils import get_instance_fn

import mlx_provider.litellm as ours
from mlx_provider.litellm.hook import DeploymentHook
from mlx_provider.litellm.patches import register

HI = [{"role": "user", "content": "hi"}]


def registered():
    hooks = [c for c in litellm.callbacks if type(c).__name__ == DeploymentHook.__name__]
    entries = [e for e in litellm.custom_provider_map if e["provider"] == "mlx"]
    return len(hooks), len(entries)


def test_registering_twice_registers_once():
    assert registered() == (1, 1)
    register(ours.handler)
    assert registered() == (1, 1)
    importlib.reload(importlib.import_module("mlx_provider.litellm.patches"))
    assert registered() == (1, 1)


@pytest.mark.parametrize("folder", ["", "mlx_provider"])
def test_litellm_resolves_the_configured_handler_name(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    config = tmp_path / "config.yaml"
    config.touch()
    found = get_instance_fn("mlx_provider.litellm.handler", str(config))
    assert found is ours.handler


@pytest.mark.parametrize(
    "model",
    [
        "org/replicate-model",
        "clarifai/x",
        "petals-team/StableBeluga2",
        "snowflake/mistral-7b",
        "Users/ä b/replicate%20x",
        "ft:gpt-3.5-turbo-local",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_name_like_that_of_a_cloud_provider_goes_to_the_engine(engine, model, stream):
    reply = await litellm.acompletion(model=f"mlx/{model}", messages=HI, stream=stream)
    if stream:
        assert [chunk async for chunk in reply]
    assert engine.request.model == model


@pytest.mark.parametrize("name", ["petals_models", "snowflake_models", "ovhcloud_models"])
async def test_a_model_on_the_list_of_a_cloud_provider_goes_to_the_engine(engine, name):
    for model in sorted(getattr(litellm, name))[:2]:
        await litellm.acompletion(model=f"mlx/{model}", messages=HI)
        assert engine.request.model == model


async def test_a_body_cannot_choose_another_provider(engine):
    await litellm.acompletion(model="mlx/m", messages=HI, custom_llm_provider="openai")
    assert engine.request.model == "m"


IN_LETTERS = "".join(f"%{byte:02X}" for byte in b"/models/a")


def entry(name, model):
    return {"model_name": name, "litellm_params": {"model": model}}


ENTRIES = [
    entry("any/*", "mlx/*"),
    entry("own", "mlx//models/a"),
    entry("own/*", "mlx//models/a"),
    entry("cloud", "mlx//models/replicate"),
]


@pytest.mark.parametrize("kind", ["chat", "messages", "embedding"])
@pytest.mark.parametrize(
    ("asked", "model", "origin"),
    [
        ("own", "/models/a", "owner"),
        ("own/anything", "/models/a", "owner"),
        ("cloud", "/models/replicate", "owner"),
        ("any//models/a", "/models/a", "client"),
        (f"any/{IN_LETTERS}", IN_LETTERS, "client"),
        ("any//models/replicate", "/models/replicate", "client"),
    ],
)
async def test_the_origin_is_owner_unless_by_wildcard(engine, kind, asked, model, origin):
    router = litellm.Router(model_list=ENTRIES)
    if kind == "chat":
        await router.acompletion(asked, messages=HI)
    elif kind == "messages":
        await router.aanthropic_messages(model=asked, messages=HI, max_tokens=9)
    else:
        await router.aembedding(asked, input="hi")
    assert (engine.request.model, engine.request.origin) == (model, origin)


async def test_a_caller_with_another_api_base_is_not_the_owner(engine):
    """LiteLLM makes an entry of its own for a call that brings its own address."""
    router = litellm.Router(model_list=ENTRIES)
    await router.acompletion("any//models/b", messages=HI, api_base="http://127.0.0.1:1")
    assert engine.request.origin == "client"


async def test_the_hook_returns_a_call_of_unknown_kind_unchanged():
    kwargs = {"model": "mlx/m"}
    assert await DeploymentHook().async_pre_call_deployment_hook(kwargs, None) == kwargs


@pytest.mark.parametrize(
    "call",
    [
        lambda: litellm.image_generation(model="mlx/m", prompt="x"),
        lambda: litellm.image_edit(model="mlx/m", prompt="x", image=b"x"),
    ],
)
def test_a_blocking_call_of_an_unserved_kind_is_refused(engine, call):
    with pytest.raises(litellm.BadRequestError, match="is not served by mlx models"):
        call()


async def test_the_hook_does_not_change_calls_of_other_providers():
    kwargs = {"model": "openai/gpt-4o", "stop": list("abcdef")}
    hook = DeploymentHook()
    assert await hook.async_pre_call_deployment_hook(kwargs, None) is None
    assert kwargs == {"model": "openai/gpt-4o", "stop": list("abcdef")}
