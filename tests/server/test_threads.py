"""An error of a thread's call keeps nothing of the call alive."""

import gc
import weakref

import anyio
import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.server.incoming import in_thread


class Prompt:
    """Something large in a frame of the call."""


def test_a_refused_call_in_a_thread_keeps_no_object_alive() -> None:
    held: list[weakref.ref[Prompt]] = []

    def refuse() -> None:
        prompt = Prompt()
        held.append(weakref.ref(prompt))
        raise BadRequest("no", param="prompt")

    async def ask() -> None:
        with pytest.raises(BadRequest, match="no") as caught:
            await in_thread(refuse)
        assert caught.value.param == "prompt"
        assert held[0]() is None

    gc.disable()
    try:
        anyio.run(ask)
    finally:
        gc.enable()
