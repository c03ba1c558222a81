"""Clips: decoded to two frames a second, within bounds, whatever their bytes are."""

import ast
import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from mlx_provider.chat.media.clip import Clip, container
from mlx_provider.chat.media.fetch import MediaPolicy
from mlx_provider.chat.media.load import load_media
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.errors import MediaError
from tiny_pictures import data_url, encoded
from waiting import wait_until

SECONDS, FPS = 3, 8


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Three seconds that grow brighter, by kind of container."""
    folder, made = tmp_path_factory.mktemp("clips"), {}
    for kind, code in (("mp4", "mp4v"), ("avi", "MJPG"), ("mkv", "MJPG")):
        path = Path(folder / f"clip.{kind}")
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*code), FPS, (96, 64))
        for i in range(SECONDS * FPS):
            frame = np.full((64, 96, 3), 10 * i, np.uint8)
            frame[:, :, 0] //= 2  # OpenCV's first colour is blue
            writer.write(frame)
        writer.release()
        made[kind] = path.read_bytes()
    # the length of the file, of which its header has none then
    made["live"] = made["mkv"].replace(b"\x44\x89\x88", b"\xec\x89\x88", 1)
    return made


def part(data: bytes, kind: str = "mp4") -> dict[str, Any]:
    url = f"data:video/{kind};base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def loaded(part: dict[str, Any], policy: MediaPolicy | None = None) -> Any:
    done = normalise([{"role": "user", "content": [part]}], hoist_system=False)
    return load_media(done.media, policy)[0]


@pytest.mark.parametrize("kind", ["mp4", "avi", "mkv", "live"])
def test_a_clip_is_decoded_to_two_frames_a_second(clips: dict[str, bytes], kind: str) -> None:
    item = loaded(part(clips[kind], kind))
    assert (item.kind, item.shape) == ("video", (2 * SECONDS, 64, 96, 3))
    reds = item.pixels[..., 0].mean(axis=(1, 2))
    assert np.allclose(reds, 40 * np.arange(2 * SECONDS), atol=6)
    assert np.allclose(item.pixels[..., 2].mean(axis=(1, 2)), reds / 2, atol=6)


def test_equal_clips_have_the_same_content_hash(clips: dict[str, bytes]) -> None:
    done = normalise([{"role": "user", "content": [part(clips["mp4"])]}], hoist_system=False)
    first, again = (load_media(done.media)[0] for _ in range(2))
    assert (again.content_hash, again.shape) == (first.content_hash, first.shape)
    assert (again.pixels == first.pixels).all()


BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"max_frames": 3}, r"longer than 1\.5 s"),
    ({"max_pixels": 1000}, "96 × 64 pixels, more than 1000"),
    ({"clip_timeout": 0.01}, r"more than 0\.01 s to decode"),
    ({"max_bytes": 1000}, "more than 1000"),
    ({"max_total_pixels": 1000}, "too large together"),
]


@pytest.mark.parametrize(("bound", "reason"), BOUNDS)
def test_huge_clip_is_refused(clips: dict[str, bytes], bound: dict[str, Any], reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as refused:
        loaded(part(clips["mp4"]), MediaPolicy(**bound))
    assert refused.value.param == "messages[0].content[0]"


def test_large_frames_are_scaled_down(clips: dict[str, bytes]) -> None:
    item = loaded(part(clips["mp4"]), MediaPolicy(max_clip_pixels=6 * 32 * 48))
    assert item.shape == (6, 32, 48, 3)


@pytest.mark.parametrize(
    "data",
    [b"no video", b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"],
)
def test_nothing_but_known_containers_reaches_a_decoder(data: bytes) -> None:
    assert container(data) == ""
    with pytest.raises(MediaError, match="no MP4, MOV, WebM, MKV or AVI"):
        Clip(data, "p").frames(MediaPolicy())


def test_a_clip_that_cannot_be_decoded_is_refused_as_malformed(clips: dict[str, bytes]) -> None:
    for broken in (clips["mp4"][:600], b"\x00\x00\x00\x18ftypmp42" + bytes(500)):
        with pytest.raises(MediaError, match="malformed"):
            Clip(broken, "p").frames(MediaPolicy())


def test_the_form_that_the_refusal_of_a_clip_names_is_accepted() -> None:
    with pytest.raises(MediaError) as refused:
        loaded(part(b"no video"))
    form = re.search(r"\{.*\}", refused.value.message)
    assert form is not None
    url = data_url(encoded(Image.new("RGB", (8, 6), "red")))
    advised = ast.literal_eval(form[0].replace("[image URLs]", repr([url, url])))
    assert loaded(advised).shape == (2, 6, 8, 3)


def test_a_clip_leaves_no_file(
    clips: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Clip(clips["mp4"], "here").frames(MediaPolicy())
    with pytest.raises(MediaError, match="malformed"):
        Clip(clips["mp4"][:200], "here").frames(MediaPolicy())
    assert not [*tmp_path.iterdir()]


def test_a_killed_engine_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text("import time\ntime.sleep(600)\n")  # decoding never ends
    engine = (
        "from mlx_provider.chat.media.clip import Clip; "
        "from mlx_provider.chat.media.fetch import MediaPolicy; "
        "Clip(b'RIFF....AVI ', '').frames(MediaPolicy())"
    )
    kept = tmp_path / "kept"
    kept.mkdir()
    running = subprocess.Popen(
        [sys.executable, "-c", engine],
        env={**os.environ, "TMPDIR": str(kept), "PYTHONPATH": str(tmp_path)},
    )
    child = wait_until(lambda: children(running.pid))[0]
    assert wait_until(lambda: [*kept.iterdir()])
    running.kill()
    running.wait()
    wait_until(lambda: not alive(child))
    assert not [*kept.iterdir()]


def children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, check=True)
    pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
    return [pid for pid, parent in pairs if parent == process]


def alive(process: int) -> bool:
    """Whether it runs: one that nobody has waited for is a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith(b"Z")
