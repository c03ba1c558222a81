"""What clients on this machine are set to, read and never written."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_provider.doctor import Subject, clients
from mlx_provider.doctor.clients import Target, targets

Make = Callable[..., Subject]
ELSEWHERE = "https://api.example.com/v1"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port where nobody does, nor can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def state(subject: Subject) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in clients.configured(subject)]


def test_nothing_is_set(subject: Make) -> None:
    assert state(subject()) == [("clients.found", "ok")]


@pytest.mark.parametrize("variable", ["ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"])
def test_a_variable_names_a_server(variable: str, subject: Make, port: int, nobody: int) -> None:
    def found(url: str) -> list[tuple[str, str]]:
        return state(subject(environ={variable: url}))

    assert found(f"http://127.0.0.1:{port}/v1") == [("clients.address", "ok")]
    assert found(f"http://localhost:{nobody}") == [("clients.address", "warn")]
    assert found(ELSEWHERE) == [("clients.elsewhere", "note")]
    assert found("127.0.0.1:4000") == [("clients.address", "warn")]
    assert found("http://127.0.0.1:port") == [("clients.address", "warn")]


FILES = [
    (
        "Claude Code",
        ".claude/settings.json",
        {"env": {"ANTHROPIC_BASE_URL": "ADDRESS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "8000"}},
    ),
    (
        "Codex CLI",
        ".codex/config.toml",
        'model_provider = "mine"\nmodel_context_window = 8000\n'
        '[model_providers.mine]\nbase_url = "ADDRESS"\n[model_providers.other]\nbase_url = "no"\n',
    ),
    (
        "OpenCode",
        ".config/opencode/opencode.json",
        {
            "provider": {
                "mine": {
                    "options": {"baseURL": "ADDRESS"},
                    "models": {"a": {"limit": {"context": 8000}}, "b": {}},
                }
            }
        },
    ),
    (
        "Qwen Code",
        ".qwen/settings.json",
        {
            "security": {"auth": {"baseUrl": "ADDRESS"}},
            "model": {"generationConfig": {"contextWindowSize": 8000}},
        },
    ),
    (
        "pi",
        ".pi/agent/models.json",
        {"providers": {"mine": {"baseUrl": "ADDRESS", "models": [{"contextWindow": 8000}]}}},
    ),
    (
        "Continue",
        ".continue/config.yaml",
        "models:\n- apiBase: ADDRESS\n  defaultCompletionOptions: {contextLength: 8000}\n",
    ),
]


@pytest.mark.parametrize(("client", "file", "content"), FILES, ids=[each[0] for each in FILES])
def test_a_file_names_a_server_and_a_context(
    client: str, file: str, content: object, subject: Make, port: int, tmp_path: Path
) -> None:
    here = subject()
    url = f"http://127.0.0.1:{port}/v1"
    text = content if isinstance(content, str) else json.dumps(content)
    path = here.home / file
    write(path, text.replace("ADDRESS", url))
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert list(targets(here.registry.clients.values(), here.environ, here.home)) == [
        Target(client, str(path), url, 8000)
    ]
    assert state(here) == [("clients.address", "ok"), ("clients.context", "warn")]
    write(path, text.replace("ADDRESS", url).replace("8000", "64000"))
    assert state(here) == [("clients.address", "ok")]
    write(path, "{ // a comment")
    assert state(here) == [("clients.file", "note")]
    write(path, "[1, 2]" if not file.endswith("toml") else "")
    assert state(here) == [("clients.found", "ok")]
    path.write_bytes(before[0])
    list(clients.configured(here))
    assert path.read_bytes() == before[0]


def test_a_folder_of_its_own_goes_before_the_home_folder(
    subject: Make, port: int, tmp_path: Path
) -> None:
    here = subject(environ={"CODEX_HOME": str(tmp_path / "codex")})
    text = 'model_provider = "m"\n[model_providers.m]\nbase_url = "http://127.0.0.1:%d"\n'
    write(here.home / ".codex/config.toml", text % 1)
    write(tmp_path / "codex/config.toml", text % port)
    assert state(here) == [("clients.address", "ok")]


def test_a_context_beyond_the_models(subject: Make, port: int, whole: Path) -> None:
    variables = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "200000",
    }
    assert state(subject(environ=variables)) == [("clients.address", "ok")]
    (_, told) = clients.configured(subject(whole, environ=variables))
    assert (told.name, told.state) == ("clients.context", "warn")
    assert "32,768" in told.remedy


def test_no_password_is_shown(subject: Make) -> None:
    (told,) = clients.configured(
        subject(environ={"OPENAI_BASE_URL": "https://me:hidden@example.com/v1"})
    )
    assert "hidden" not in told.what
    assert "example.com" in told.what


def test_keys_and_web_proxies(subject: Make) -> None:
    both = {"ANTHROPIC_API_KEY": "a", "ANTHROPIC_AUTH_TOKEN": "b"}
    assert [each.state for each in clients.keys(subject(environ=both))] == ["warn"]
    assert list(clients.keys(subject(environ={"ANTHROPIC_API_KEY": "a"}))) == []
    web = {"HTTPS_PROXY": "http://proxy:3128"}
    assert [each.state for each in clients.web_proxies(subject(environ=web))] == ["warn"]
    exempt = {**web, "NO_PROXY": "localhost,127.0.0.1"}
    assert list(clients.web_proxies(subject(environ=exempt))) == []


def test_a_third_partys_client_is_looked_for_too_and_its_fault_is_told(
    subject: Make, port: int, install_plugin: Callable[..., str]
) -> None:
    install_plugin(
        "mlx-provider-mine",
        """
from mlx_provider import Client, ClientServer, ClientSettings, Profile, hookimpl

def servers(content):
    yield ClientServer(content["url"])

@hookimpl
def mlx_clients():
    yield Client("mine", "mine", "", lambda gateway: Profile(),
                 settings=ClientSettings((), (".mine.json",), servers))
""",
    )
    here = subject()
    write(here.home / ".mine.json", {"url": f"http://127.0.0.1:{port}"})
    assert state(here) == [("clients.address", "ok")]
    write(here.home / ".mine.json", {})
    (told,) = clients.configured(here)
    assert told.name == "clients.file"
    assert "KeyError" in told.what
