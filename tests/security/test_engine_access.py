"""Who gets into an engine, and what each may ask of it: tried from outside, as a stranger would."""

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from mlx_provider.errors import BadRequest, Forbidden, ModelNotFound
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.server import connections as owner_socket
from mlx_provider.server.access import (
    Gate,
    Key,
    engine_keys,
    host_names,
    host_of,
    own_key_file,
    read_key,
    read_keys,
)
from mlx_provider.server.connections import listen_unix
from mlx_provider.serving.permissions import Permissions, read_permissions
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from tiny import build

SERVER = (sys.executable, "-P", "-m", "mlx_provider.server.run", "--port", "0")
HELLO = [{"role": "user", "content": "Hello"}]


class Door:
    """A real engine on loopback, started without a key, and what it answers."""

    def __init__(self, url: str, key_file: Path, roots: Path) -> None:
        self.url, self.key_file, self.roots = url, key_file, roots
        self.key = key_file.read_text().strip()

    def post(self, *, key: bool = True, content: bytes | None = None, **more: object):
        headers = {"authorization": f"Bearer {self.key}"} if key else {}
        headers |= more.pop("headers", {})  # type: ignore[arg-type]
        body = {"json": more} if content is None else {"content": content}
        with httpx.Client(trust_env=False, timeout=300) as client:
            return client.post(f"{self.url}/v1/generate", headers=headers, **body)

    def refusal(self, **more: object) -> tuple[int, str]:
        answer = self.post(**more)
        return answer.status_code, answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "MLX_PROVIDER_MODEL_ROOTS": str(folder / "models"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    (folder / "models").mkdir()
    build(folder / "models" / "served", "qwen3")
    process = subprocess.Popen(SERVER, stderr=subprocess.PIPE, text=True, env=environ, cwd=folder)
    assert process.stderr is not None
    ready = next(line for line in process.stderr if " engine on " in line)
    url = re.search(r"engine on (\S+)", ready)
    key_file = re.search(r"key: (\S+)", ready)
    assert url is not None
    assert key_file is not None
    reading = threading.Thread(target=process.stderr.read)
    reading.start()
    yield Door(url[1], Path(key_file[1]), folder / "models")
    process.terminate()
    process.wait(300)
    reading.join()
    process.stderr.close()


@pytest.fixture
def code_folder(tmp_path: Path) -> Path:
    """A model folder that leaves a mark when its code is run."""
    folder = build(tmp_path / "evil", "qwen3")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"model_file": "own.py",', 1))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    return folder


def test_an_engine_started_without_a_key_makes_one_for_its_owner(door: Door) -> None:
    assert stat.S_IMODE(door.key_file.stat().st_mode) == 0o600
    assert len(door.key) > 32
    for path in ("/health", "/metrics", "/v1/models", "/v1/attach", "/cache"):
        answer = httpx.get(door.url + path, trust_env=False, timeout=300)
        assert answer.status_code == 401, path
    assert door.refusal(key=False, model="demo", messages=HELLO)[0] == 401
    assert door.post(model="demo", messages=HELLO, max_tokens=1).status_code == 200


@pytest.mark.parametrize("key", [False, True])
def test_a_web_page_cannot_use_the_engine(door: Door, code_folder: Path, key: bool) -> None:
    request = GenerateRequest(
        model=str(code_folder), messages=HELLO, options=ModelOptions(trust_remote_code=True)
    )
    page = {"origin": "https://page.example", "content-type": "text/plain"}
    body = request.model_dump_json().encode()
    assert door.refusal(key=key, content=body, headers=page)[0] == 403
    assert not (code_folder.parent / "ran").exists()
    for origin in ("null", door.url, "http://localhost"):
        headers = {"origin": origin, "content-type": "application/json"}
        assert door.refusal(key=key, content=body, headers=headers)[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_a_body_must_be_declared_as_json(door: Door, kind: str) -> None:
    body = GenerateRequest(model="demo", messages=HELLO).model_dump_json().encode()
    status, message = door.refusal(content=body, headers={"content-type": kind})
    assert status == 415
    assert "application/json" in message


@pytest.mark.parametrize("host", ["page.example", "127.0.0.1.page.example:80", "localhost.evil"])
def test_a_request_with_a_foreign_host_header_is_refused(door: Door, host: str) -> None:
    status, message = door.refusal(model="demo", messages=HELLO, headers={"host": host})
    assert status == 403
    assert "MLX_PROVIDER_ALLOWED_HOSTS" in message


@pytest.mark.parametrize(
    ("header", "name"),
    [("LocalHost:80", "localhost"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("a.b.", "a.b")],
)
def test_the_host_name_is_read_from_the_header(header: str, name: str) -> None:
    assert host_of(header) == name


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True},
        {"adapter": "/tmp/adapter"},
        {"allow_media": ["private"]},
        {"allow_media": ["file"]},
        {"extra": {"a": 1}},
        {"dtype": "bfloat16"},
        {"modality": "text"},
        {"draft_model": "/tmp/small"},
        {"keep_alive": -1},
        {"context_length": 10**12},
        {"cache_salt": "somebody's"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_key_holder_cannot_set_options_of_the_owner(door: Door, options: dict) -> None:
    status, message = door.refusal(model="demo", messages=HELLO, options=options)
    assert status in (400, 403)
    assert next(iter(options)) in message


def test_a_key_holder_cannot_choose_the_template_the_origin_or_the_namespace(door: Door) -> None:
    for name in ("chat_template", "tokenizer_kwargs", "add_generation_prompt", "self"):
        status, message = door.refusal(model="demo", messages=HELLO, template={name: "x"})
        assert (status, name in message) == (400, True)
    assert door.refusal(model="/etc", messages=HELLO, origin="owner")[0] == 404
    assert door.refusal(model="demo", messages=HELLO, namespace="x")[0] == 400


def test_code_of_a_folder_never_runs_over_the_network(door: Door, code_folder: Path) -> None:
    evil = door.roots / "evil"
    evil.symlink_to(code_folder)
    inside = door.roots / "copied"
    if not inside.exists():
        code_folder.rename(inside)
    for model in (str(evil), str(inside)):
        answer = door.post(model=model, messages=HELLO, options={"trust_remote_code": True})
        assert answer.status_code == 403
        assert door.post(model=model, messages=HELLO).status_code in (400, 404)
    assert not (code_folder.parent / "ran").exists()
    evil.unlink()


def test_folders_outside_the_model_roots_all_get_one_404(door: Door, tmp_path: Path) -> None:
    there = build(tmp_path / "model", "qwen3")
    names = [str(there), str(tmp_path), "/etc/passwd", "/no/such/folder", "~/x", "~root/x", ".."]
    names += [f"{door.roots}/../model", f"{door.roots}/absent", f"{door.roots}"]
    (door.roots / "link").symlink_to(there)
    answers = {name: door.refusal(model=name, messages=HELLO) for name in names}
    answers["link"] = door.refusal(model=str(door.roots / "link"), messages=HELLO)
    told = {(status, message.split("'", 2)[2]) for status, message in answers.values()}
    assert len(told) == 1, answers
    assert told.pop()[0] == 404
    served = door.post(model=str(door.roots / "served"), messages=HELLO, max_tokens=1)
    assert served.status_code == 200, served.text


def test_a_hub_id_never_names_a_folder_of_the_working_directory(door: Door) -> None:
    (door.roots.parent / "models" / "plain").mkdir(exist_ok=True)
    names = ["models/served", "models/plain", "models/absent", "served/models"]
    answers = {name: door.refusal(model=name, messages=HELLO) for name in names}
    told = {(status, message.replace(name, "")) for name, (status, message) in answers.items()}
    assert len(told) == 1, answers
    assert "HF_HUB_OFFLINE" in told.pop()[1]


def test_a_client_of_a_wildcard_can_name_only_folders_under_the_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = build(tmp_path / "roots" / "a", "qwen3")
    outside = build(tmp_path / "b", "qwen3")
    permissions = Permissions([tmp_path / "roots"], {str(outside): ModelOptions(kv_bits=8)})

    def ask(model: object, origin: str = "client") -> GenerateRequest:
        request = GenerateRequest(model=str(model), messages=HELLO, origin=origin)
        return permissions.apply(request)

    ask(inside)
    assert ask(outside).options.kv_bits == 8  # the file names it
    ask("maker/model@v1")
    ask("demo")
    monkeypatch.chdir(tmp_path)
    odd = ("../x/y", "./a", "a/../b", "roots/./a", "./roots/a", "maker/model@..", "a/b@v/../../c")
    for model in (tmp_path, tmp_path / "roots", *odd):
        with pytest.raises(ModelNotFound):
            ask(model)
    ask(tmp_path, "owner")


def test_the_permissions_file_permits_options_per_model(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[demo]\nallow_media = ["private"]\n["a/b"]\nkv_bits = 4\n')
    permissions = Permissions((), read_permissions(file))
    request = GenerateRequest(
        model="a/b", messages=HELLO, origin="remote", options=ModelOptions(tool_parser="hermes")
    )
    options = permissions.apply(request).options
    assert (options.tool_parser, options.kv_bits) == ("hermes", 4)
    request = request.model_copy(update={"model": "demo"})
    assert permissions.apply(request).options.allow_media == ["private"]
    files = request.model_copy(update={"options": ModelOptions(allow_media=["file"])})
    with pytest.raises(Forbidden, match="allow_media"):
        permissions.apply(files)
    ours = permissions.apply(files.model_copy(update={"origin": "client"}))
    assert ours.options.allow_media == ["file", "private"]


def test_only_the_permissions_file_permits_a_longer_context(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[demo]\ncontext_length = 70000\n")

    def context(models_file: Path | None, asked: int | None) -> int:
        service = ChatService(EngineSettings(models_file=models_file, kv_layout="solo"))
        request = GenerateRequest(
            model="demo",
            messages=HELLO,
            max_tokens=1,
            origin="remote",
            options=ModelOptions(context_length=asked),
        )
        try:
            return service.submit(request, EventQueue()).context_length
        finally:
            service.close()

    assert [context(file, asked) for asked in (None, 90000, 100)] == [70000, 70000, 100]
    with pytest.raises(Forbidden, match="MLX_PROVIDER_MODELS_FILE"):
        context(None, 70000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[demo]\nkv_bits = 3\n", ["demo", "kv_bits"]),
        ("[demo]\nnonsense = 1\n", ["demo", "nonsense"]),
        ("demo = 1\n", ["demo"]),
        ("[demo\n", ["models.toml"]),
        ("x = " + "[" * 100_000, ["models.toml"]),
        ("\xff", ["models.toml"]),
    ],
)
def test_invalid_permissions_files_are_refused(tmp_path: Path, text: str, told: list[str]) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadRequest) as caught:
        read_permissions(file)
    assert all(word in caught.value.message for word in told)


def test_a_permissions_file_writable_by_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[demo]\ntrust_remote_code = true\n")
    file.chmod(0o666)
    with pytest.raises(BadRequest, match="chmod"):
        read_permissions(file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="pipe"):
        read_permissions(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("scheme", "status"),
    [("Bearer ", 200), ("bearer ", 200), ("BEARER   ", 200), ("Basic ", 401), ("", 401)],
)
async def test_a_scheme_has_any_case_and_a_key_ends_with_any_byte(
    monkeypatch: pytest.MonkeyPatch, scheme: str, status: int
) -> None:
    """In UTF-8, the key ends with a byte that is a space in latin-1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box.corp.example")
    hosts = {*host_names("0.0.0.0"), "Listed.example."}
    gate = Gate(PlainTextResponse("in"), [Key("voilà")], hosts)
    headers = {"authorization": f"{scheme}voilà".encode()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate)) as client:
        for host in ("box:80", "listed.example", "listed.example."):
            assert (await client.get(f"http://{host}/", headers=headers)).status_code == status


def test_engine_keys_are_made_once_and_read_with_their_names(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    made, place = engine_keys(None, environ)
    assert engine_keys(None, environ) == (made, place)
    assert Path(place) == own_key_file(environ)
    assert stat.S_IMODE(Path(place).parent.stat().st_mode) == 0o700
    assert engine_keys(None, {**environ, "MLX_PROVIDER_API_KEY": "given"})[0] == (Key("given"),)
    mine = tmp_path / "key"
    mine.write_text("mine\n")
    with pytest.raises(BadRequest, match="chmod 600"):
        engine_keys(mine, environ)
    mine.chmod(0o600)
    assert engine_keys(mine, environ) == ((Key("mine"),), str(mine))
    assert read_key(mine) == "mine"
    mine.write_text(f"mine\n\nalice {'a' * 16}\nbob\t{'b' * 16}\n")
    assert engine_keys(mine, environ)[0] == (
        Key("mine"),
        Key("a" * 16, "alice"),
        Key("b" * 16, "bob"),
    )
    assert "aaa" not in repr(read_keys(mine))
    with pytest.raises(BadRequest, match="several keys"):
        read_key(mine)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n", "holds no key"),
        ("secret-secret-secret-1 is my key", "line 1: more than two words"),
        ("secret-a\nsecret-b", "line 2: line 1 has no name either"),
        (
            "a secret-secret-secret-1\n\na secret-secret-secret-2",
            "line 3: the name is that of line 1",
        ),
        ("a secret-secret-secret-1\nb secret-secret-secret-1", "line 2: the key is that of line 1"),
        ("a secret", "line 1: the key after the name needs at least 16 characters"),
        ("secret-secret/secret-1 alice", "line 1: the name before the key must be"),
        ("a secret-secret-secret-\xe4", "line 1: a character is not printable ASCII"),
        ("a secret-secret-secret-\x1b", "line 1: a character is not printable ASCII"),
    ],
)
def test_a_wrong_key_file_is_named_with_the_line_but_no_key(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadRequest) as caught:
        read_keys(file)
    assert told in caught.value.message
    assert "secret" not in caught.value.message


def test_the_socket_reports_the_user_of_the_connected_process() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert owner_socket.peer_uid(one) == os.getuid()


def test_a_connection_of_another_user_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen_unix(tmp_path / "s")
    with listener.socket, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
        monkeypatch.setattr(owner_socket, "peer_uid", lambda connection: os.getuid() + 1)
        with pytest.raises(ConnectionAbortedError):
            listener.socket.accept()
        assert client.recv(1) == b""
