"""A repeated image is not decoded again, not split into patches again, not encoded again."""

import base64
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.events import Delta
from noted_calls import note_calls
from tiny import build
from tiny.models import tiny_image_part
from tiny_pictures import data_url, encoded

from .conftest import PATIENCE


def question(text: str, *seeds: int) -> list[dict[str, Any]]:
    parts = [tiny_image_part(seed) for seed in seeds]
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
    own_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = note_calls(
        monkeypatch, Qwen3VLImageProcessor, "_process_one", lambda _, image, **more: image.shape
    )
    tiny = own_model(build(tmp_path / "tiny", "qwen3_vl"), kv_layout="solo")
    first = tiny.ask(messages=question("What is it?", 1)).only
    assert len(worked) == 1
    assert tiny.ask(messages=question("What is it?", 1)).only == first
    tiny.ask(messages=question("Which colour?", 1))
    assert len(worked) == 1
    tiny.ask(messages=question("Which colour?", 1, 2))
    assert len(worked) == 2
    tiny.ask(messages=question("What is it?", 1), salt="another, who must not learn of it")
    assert len(worked) == 3


def test_an_image_whose_features_were_evicted_is_processed_again(
    own_model: Any, tmp_path: Path
) -> None:
    tiny = own_model(
        build(tmp_path / "tiny", "qwen3_vl"), kv_layout="solo", feature_bytes=0, prefix_bytes=0
    )
    first = tiny.ask(messages=question("What is it?", 1)).only
    assert tiny.ask(messages=question("What is it?", 1)).only == first


def png(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height), "red"))


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
RED = png(64, 64)
BAD: dict[str, tuple[Any, str]] = {
    "half": (RED[: len(RED) // 2], "damaged"),
    "empty": (b"", "empty"),
    "svg": (SVG, "damaged"),
    "html": (b"<!doctype html><p>404", "damaged"),
    "banner": (png(1000, 4), "this model cannot take it"),
    "not base64": ("data:image/png;base64,ä", "damaged"),
    "no source": (None, "not available"),
    "a file": ("file:///etc/passwd", "not available"),
    "ftp": ("ftp://a.test/a.png", "not available"),
    "private": ("http://127.0.0.1:9/a.png", "not available"),
}


def bad_part(name: str) -> dict[str, Any]:
    source = BAD[name][0]
    if isinstance(source, bytes):
        source = data_url(source)
    return {"type": "image_url", "image_url": {"url": source}}


def test_bad_images_of_earlier_turns_become_text(own_model: Any, tmp_path: Path) -> None:
    """Agents send their history again, so that one of them would end the session."""
    tiny = own_model(build(tmp_path / "tiny", "qwen3_vl"), kv_layout="solo")
    call = {"id": "c", "function": {"name": "read", "arguments": "{}"}}
    calling: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    good, go_on = tiny_image_part(1), {"role": "user", "content": "go on"}
    for name in BAD:
        bad = bad_part(name)
        result = {"role": "tool", "tool_call_id": "c", "content": [good, bad]}
        shot = {"role": "user", "content": [bad, good]}
        done = {"role": "assistant", "content": "done"}
        expected = f"[image: {BAD[name][1]}, not shown]"
        for sent, param in (
            ([go_on, calling, result], "messages[2].content[1]"),
            ([go_on, calling, result, shot], "messages[2].content[1]"),
            ([shot, done, go_on], "messages[0].content[0]"),
        ):
            bads = str(sent).count("'image_url': {'url': ") - str(sent).count(str(good))
            text = tiny.prompt_of(messages=sent)
            assert text.count(expected) == bads, (name, text)
            assert text.count("<|image_pad|>") == str(sent).count(str(good))
            running = tiny.start(messages=sent, max_tokens=1)
            warnings = tiny.read(running).warnings
            assert len(warnings) == bads
            assert any(warning.startswith(param) for warning in warnings)
        with pytest.raises(BadRequest) as refused:
            tiny.ask(messages=[go_on, done, shot])
        assert refused.value.param == "messages[2].content[0]"
        assert refused.value.message.startswith("messages[2].content[0]")
    many = [
        {"role": "user", "content": [bad_part("half"), bad_part("banner")] * 40 + [good]},
        go_on,
    ]
    text = tiny.prompt_of(messages=many)
    assert (text.count("not shown]"), text.count("<|image_pad|>")) == (80, 1)


def test_pixels_are_kept_until_the_prefill_and_request_data_until_the_end(
    own_model: Any, tmp_path: Path
) -> None:
    tiny = own_model(build(tmp_path / "tiny", "qwen3_vl"), kv_layout="solo")
    service = tiny.service
    tiny.ask(messages=question("Warm up"))
    running = tiny.start(messages=question("What is it?", 1), max_tokens=200, min_tokens=200)
    assert running.get(PATIENCE)
    parts = question("", 1)[0]["content"]
    sent = len(base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2]))
    assert service.media.nbytes in (sent, 0), "no pixel is left"
    tiny.read(running)
    assert service.media.nbytes == 0
    with pytest.raises(BadRequest):
        tiny.ask(messages=question("What is it?", 1), min_tokens=9, max_tokens=1)
    assert service.media.nbytes == 0
    assert not service.in_flight.active()
