"""A Hub on loopback, and an empty cache for what comes from it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from local_server import Handler, serving


class Hub:
    """What it has, by repository; `lost` are files that break off in the middle, `busy` those for
    which it has no time, and `sizes` are told in the place of real ones. `asked` are requests."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.sizes: dict[str, int] = {}
        self.lost: set[str] = set()
        self.busy: set[str] = set()
        self.asked: list[str] = []

    def commit(self, repo: str) -> str:
        return _digest(repr(self.files[repo]).encode())

    def about(self, repo: str) -> dict[str, object]:
        siblings = [{"rfilename": n, "size": self._size(repo, n)} for n in self.files[repo]]
        return {"id": repo, "sha": self.commit(repo), "siblings": siblings}

    def tree(self, repo: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": n, "size": self._size(repo, n), "oid": _digest(content)}
            for n, content in self.files[repo].items()
        ]

    def has(self, path: str) -> str | None:
        return next((repo for repo in self.files if f"{repo}/" in f"{path}/"), None)

    def _size(self, repo: str, name: str) -> int:
        return self.sizes.get(name, len(self.files[repo][name]))


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def handler(hub: Hub) -> type[Handler]:
    class Repositories(Handler):
        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            repo, name = hub.has(path), path.rpartition("/")[2]
            if repo is None or ("/resolve/" in path and name not in hub.files[repo]):
                self.answer(b'{"error": "Repository not found"}', 404)
                return
            if name in hub.busy:
                self.answer(b'{"error": "busy"}', 503)
                return
            shown = hub.tree(repo) if "/tree/" in path else hub.about(repo)
            body = hub.files[repo][name] if "/resolve/" in path else json.dumps(shown).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", f'"{_digest(body)}"')
            self.send_header("x-repo-commit", hub.commit(repo))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if name in hub.lost else body)

        do_HEAD = do_GET

    return Repositories


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub, cache = Hub(), str(tmp_path / "hub")
    with serving(handler(hub)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        monkeypatch.setenv("HF_HUB_CACHE", cache)
        yield hub
