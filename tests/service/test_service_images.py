"""A repeated image is not decoded again, not split into patches again, not encoded again."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.events import Delta
from mlx_provider.testing.tiny import build
from mlx_provider.testing.tiny.media import tiny_pixels

from .conftest import PATIENCE, Tiny


def image_part(seed: int) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(tiny_pixels(seed)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def question(text: str, *seeds: int) -> list[dict[str, Any]]:
    parts = [image_part(seed) for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_text_about_an_image_is_streamed_in_whole_characters(tiny: Any, family: str) -> None:
    model = tiny(family)
    asked = question("What is it?", 1)
    with model.pausing(after=20):
        running = model.start(messages=asked, max_tokens=40, min_tokens=40, logprobs=True)
        begun = running.get(PATIENCE)
    answer = model.read(running, begun=begun)
    decoded = model.served().model.tokenizer.decode(answer.only.tokens)
    assert answer.only.content == decoded
    assert any(isinstance(event, Delta) for event in begun), "it begins before the reply is whole"
    assert answer.deltas > 1
    assert model.ask(messages=asked, max_tokens=40, min_tokens=40).only.content == decoded


def test_work_on_an_image_is_done_once(
    make_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[tuple[int, ...]] = []
    original = Qwen3VLImageProcessor._process_one

    def counted(self: Any, image: Any, **options: Any) -> Any:
        worked.append(image.shape)
        return original(self, image, **options)

    monkeypatch.setattr(Qwen3VLImageProcessor, "_process_one", counted)
    service, client = make_service()
    tiny = Tiny(client, service, str(build(tmp_path / "tiny", "qwen3_vl")))
    first = tiny.ask(messages=question("What is it?", 1)).only
    assert len(worked) == 1
    assert tiny.ask(messages=question("What is it?", 1)).only == first
    tiny.ask(messages=question("Which colour?", 1))
    assert len(worked) == 1
    tiny.ask(messages=question("Which colour?", 1, 2))
    assert len(worked) == 2


def test_an_image_whose_features_were_evicted_is_processed_again(
    make_service: Any, tmp_path: Path
) -> None:
    service, client = make_service(feature_bytes=0, prefix_bytes=0)
    tiny = Tiny(client, service, str(build(tmp_path / "tiny", "qwen3_vl")))
    first = tiny.ask(messages=question("What is it?", 1)).only
    assert tiny.ask(messages=question("What is it?", 1)).only == first


def test_pixels_are_held_until_the_prefill_and_request_data_until_the_end(
    make_service: Any, tmp_path: Path
) -> None:
    service, client = make_service()
    tiny = Tiny(client, service, str(build(tmp_path / "tiny", "qwen3_vl")))
    tiny.ask(messages=question("Warm up"))
    running = tiny.start(messages=question("What is it?", 1), max_tokens=200, min_tokens=200)
    assert running.get(PATIENCE)
    parts = question("", 1)[0]["content"]
    sent = len(base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2]))
    assert service._media.held in (sent, 0), "no pixel is left"
    (request,) = [each.request for each in service._in_flight.active()] or [None]
    if request is not None:
        assert [span.ready._made for span in request.prompt.spans] == [None]
    del request
    tiny.read(running)
    assert service._media.held == 0
    with pytest.raises(BadRequest):
        tiny.ask(messages=question("What is it?", 1), min_tokens=9, max_tokens=1)
    assert service._media.held == 0
    assert not service._in_flight.active()
