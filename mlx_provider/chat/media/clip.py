"""A video clip as frames, decoded in a separate process. Clips are untrusted and their decoders are
C libraries (FFmpeg, in opencv's wheel, a dependency of mlx-vlm): the process limits time and
memory, and a crash affects only that clip."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the process runs this file alone
    import numpy as np
    from numpy.typing import NDArray

    from .fetch import MediaPolicy

REFUSED = 3  # exit code of a process that has written a reason to standard output
RATE = 2.0  # frames per second, as vision families assume for a list of frames
MEMORY = 4 * 2**30  # bytes of address space of the process; on macOS of resident memory
REMEDY = "send it shorter, or as frames: {'type': 'video_url', 'video_url': [image URLs]}"


@dataclass(frozen=True)
class Clip:
    """An encoded video. `path`: the part of the request that holds it."""

    data: bytes
    path: str

    def frames(self, policy: MediaPolicy) -> NDArray[np.uint8]:
        """RGB, (count, H, W, 3), two frames per second. Raises `MediaError` that names the part."""
        if not (suffix := container(self.data)):
            raise self._error("the data is no MP4, MOV, WebM, MKV or AVI video")
        descriptor, name = tempfile.mkstemp(suffix, "mlx-clip-")
        file = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(self.data)
            return self._decode(file, policy)
        finally:
            file.unlink(missing_ok=True)

    def _decode(self, file: Path, policy: MediaPolicy) -> NDArray[np.uint8]:
        import numpy as np

        from ...bounded_process import memory_limit

        bounds = (os.getpid(), policy.max_frames, policy.max_pixels, policy.max_clip_pixels)
        command = [sys.executable, "-P", __file__, str(file), *map(str, bounds)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        with process, memory_limit(process, MEMORY):
            try:
                written, _ = process.communicate(timeout=policy.clip_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                late = f"the video takes more than {policy.clip_timeout:g} s to decode"
                raise self._error(late) from None
        if process.returncode == REFUSED:
            raise self._error(written.decode())
        if process.returncode != 0:
            raise self._error("the video is malformed, or no decoder supports it")
        frames: NDArray[np.uint8] = np.load(io.BytesIO(written), allow_pickle=False)
        return frames

    def _error(self, reason: str) -> Exception:
        from ...errors import MediaError

        return MediaError(f"{self.path}: {reason}; {REMEDY}", param=self.path)


def container(data: bytes) -> str:
    """The file suffix for a video, by its first bytes; empty: no known video. So FFmpeg gets no
    playlists or scripts, which refer to other files and addresses."""
    if data[4:8] == b"ftyp":
        return ".mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return ".mkv"
    return ".avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else ""


def _exit_with_engine(file: Path, engine: int) -> None:
    while os.getppid() == engine:
        time.sleep(0.5)
    file.unlink(missing_ok=True)
    os._exit(1)


def _main(path: str, engine: int, max_frames: int, max_pixels: int, max_clip_pixels: int) -> int:
    """Write frames, or the reason of a refusal, to standard output, and return the exit code. The
    file is removed after it is opened. `engine`: the process that waits for the frames."""
    file = Path(path)
    threading.Thread(target=_exit_with_engine, args=(file, engine), daemon=True).start()
    if sys.platform == "linux":  # other systems refuse such a limit or do not apply it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import cv2
    import numpy as np

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    file.unlink(missing_ok=True)
    width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    if not capture.isOpened() or width < 1 or height < 1:
        return 1
    if width * height > max_pixels:
        return _refuse(f"its frames are {width} × {height} pixels, more than {max_pixels}")
    length = capture.get(cv2.CAP_PROP_FRAME_COUNT) / max(1.0, capture.get(cv2.CAP_PROP_FPS))
    # some headers, as of streams, have no length
    expected = min(max(1, round(length * RATE)), max_frames) if length > 0 else max_frames
    frames: list[Any] = []
    while capture.grab():
        if capture.get(cv2.CAP_PROP_POS_MSEC) / 1000 < len(frames) / RATE:
            continue
        read, frame = capture.retrieve()
        if not read:
            break
        frames.append(_scale(frame, max_clip_pixels // expected))
        if len(frames) > max_frames or len(frames) > 2 * expected + 2:
            return _refuse(f"it is longer than {max_frames / RATE:g} s, or than its header says")
    if not frames:
        return 1
    frames = [_scale(frame, max_clip_pixels // len(frames)) for frame in frames]
    written = io.BytesIO()  # NumPy asks a file for its position, which a pipe does not have
    np.save(written, np.stack(frames)[..., ::-1])  # OpenCV's colours are BGR
    sys.stdout.buffer.write(written.getbuffer())
    return 0


def _scale(frame: Any, pixels: int) -> Any:
    import cv2

    height, width = frame.shape[:2]
    share = min(1.0, (pixels / (height * width)) ** 0.5)
    size = max(1, int(width * share)), max(1, int(height * share))
    return cv2.resize(frame, size, interpolation=cv2.INTER_AREA) if share < 1 else frame


def _refuse(reason: str) -> int:
    sys.stdout.buffer.write(reason.encode())
    return REFUSED


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], *map(int, sys.argv[2:])))
