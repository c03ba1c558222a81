"""Calls that mlx models do not answer: one clear line, whichever way they come."""

import litellm
import pytest

from mlx_provider.litellm.hook import DeploymentHook

WORDS = "is not served by mlx models, which answer chat completions"

CALLS = {
    "image_generation": lambda: litellm.aimage_generation(model="mlx/m", prompt="x"),
    "image_edit": lambda: litellm.aimage_edit(model="mlx/m", prompt="x", image=b"x"),
    "rerank": lambda: litellm.arerank(model="mlx/m", query="x", documents=["a"]),
    "speech": lambda: litellm.aspeech(model="mlx/m", input="x", voice="v"),
    "transcription": lambda: litellm.atranscription(model="mlx/m", file=b"x"),
    "moderation": lambda: litellm.amoderation(model="mlx/m", input="x"),
    "create_batch": lambda: litellm.acreate_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id="f",
        custom_llm_provider="mlx",
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_the_hook_refuses(engine, name):
    with pytest.raises(litellm.BadRequestError, match=f"{name} {WORDS}") as caught:
        await CALLS[name]()
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: litellm.image_generation(model="mlx/m", prompt="x"),
        lambda: litellm.image_edit(model="mlx/m", prompt="x", image=b"x"),
    ],
)
def test_the_handler_refuses(engine, call):
    with pytest.raises(litellm.BadRequestError, match=WORDS):
        call()


async def test_a_call_of_no_known_kind_passes(engine):
    kwargs = {"model": "mlx/m"}
    assert await DeploymentHook().async_pre_call_deployment_hook(kwargs, None) == kwargs
