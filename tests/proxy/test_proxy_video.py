"""Videos through the proxy: what a client may send, and what the engine gets."""

import base64
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tiny_pictures import data_url, encoded

FRAMES = ["data:image/png;base64,AAAA", "data:image/png;base64,BBBB"]
CLIP = "data:video/mp4;base64,AAAA"


def ask(raw: Any, part: dict[str, Any], model: str = "scripted") -> Any:
    content = [{"type": "text", "text": "What happens?"}, part]
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return raw.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({"type": "video_url", "video_url": FRAMES}, FRAMES),
        ({"type": "video", "video": FRAMES}, FRAMES),
        ({"type": "video_url", "video_url": {"url": CLIP}}, {"url": CLIP}),
    ],
    ids=["frames", "frames as Qwen's servers take them", "clip"],
)
def test_a_video_reaches_the_engine(engine: Any, raw: Any, sent: Any, arrives: Any) -> None:
    reply = ask(raw, sent)
    assert reply.status_code == 200, reply.text
    (message,) = engine.request["messages"]
    assert message["content"][1] == {"type": "video_url", "video_url": arrives}


def test_videos_reach_the_vision_tower(raw: Any, own_engine: Any, tmp_path: Path) -> None:
    """The shipped model sees a list of frames and a clip of the same frames alike."""
    frames = [np.full((64, 96, 3), 60 * i, np.uint8) for i in range(4)]
    file = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"MJPG"), 2, (96, 64))
    urls = []
    for frame in frames:
        writer.write(frame)
        urls.append(data_url(encoded(Image.fromarray(frame))))
    writer.release()
    clip = "data:video/avi;base64," + base64.b64encode(file.read_bytes()).decode()
    counts = []
    for part in (
        {"type": "video_url", "video_url": urls},
        {"type": "video", "video": urls},
        {"type": "video_url", "video_url": {"url": clip}},
        {"type": "text", "text": ""},
    ):
        reply = ask(raw, part, "demo")
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] == counts[2] > counts[3] + 10


def test_the_refusal_of_a_clip_names_what_to_send(raw: Any, own_engine: Any) -> None:
    reply = ask(raw, {"type": "video_url", "video_url": {"url": CLIP}}, "demo")
    assert reply.status_code == 400
    assert "messages[0].content[1]" in reply.text
    assert "'type': 'video_url', 'video_url': [image URLs]" in reply.text
