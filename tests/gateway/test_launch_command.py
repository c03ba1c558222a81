"""`mlx-provider launch`, with clients that are stood in for, on a real proxy and engine."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_line import invoke
from local_server import Handler, serving
from mlx_provider import Gateway
from mlx_provider.gateway import foreground, launch
from mlx_provider.gateway.config import ANYTHING
from mlx_provider.gateway.launch import Launch, prepare
from mlx_provider.gateway.models import candidate
from mlx_provider.gateway.proxy import Proxy
from mlx_provider.registry import PluginRegistry
from named_plugins import discover

Install = Callable[..., str]
OURS = discover("clients", "qwen3_vl")
RUN = "from mlx_provider.cli import main; main()"
PLUGIN = """
from mlx_provider import Client, Profile, hookimpl

@hookimpl
def mlx_clients():
    yield Client("mine", "claude", "get it", lambda gateway: Profile({profile}))
"""


def run(*arguments: str, registry: PluginRegistry = OURS) -> tuple[int, str, str]:
    result = invoke("launch", *arguments, plugins=registry)
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


@pytest.fixture
def started(written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy of the tests in the place of one's own."""

    def start_proxy(config: Path, environ: dict[str, str]) -> Proxy:
        entries = json.loads(config.read_text())["model_list"]
        assert [each["model_name"] for each in entries] == ["demo", *ANYTHING]
        return running

    with subprocess.Popen(["true"]) as process:
        running = Proxy(process, written.url, written.key, written.folder)
    monkeypatch.setattr(Proxy, "wait_ready", lambda proxy: None)
    monkeypatch.setattr(launch, "start_proxy", start_proxy)


@pytest.mark.parametrize("name", OURS.clients)
def test_a_launched_client_reaches_its_api_and_leaves_no_files(
    name: str,
    started: None,
    stand_in: Callable[[str], Path],
    runtime: Path,
    tmp_path: Path,
) -> None:
    client = OURS.clients[name]
    seen = stand_in(client.command)
    launched = Launch(client, candidate("demo", OURS, 2**33).served, ["-p", "hi"], os.environ)
    assert launched.run(lambda *told: None) == 7
    told = json.loads(seen.read_text())
    assert launched.run(lambda *told: None) == 7
    again = json.loads(seen.read_text())["environment"]
    assert again == told["environment"], "agents write paths of theirs into their prompts"
    assert "Paris" in told["answer"]
    assert told["arguments"][-2:] == ["-p", "hi"]
    assert set(told["modes"].values()) <= {0o600}
    assert list((runtime / "launch").iterdir()) == []
    assert {each.name for each in (tmp_path / "tmp").iterdir()} <= {"mlx"}  # kernels of a CPU
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("names", [["NO_PROXY"], ["no_proxy"], ["NO_PROXY", "no_proxy"]])
def test_a_launched_client_keeps_what_its_user_excludes_from_proxies(names: list[str]) -> None:
    client, gateway = OURS.clients["aider"], Gateway("u", "k", "m", 1, 1, False, Path(), Path())
    for excluded, both in (("corp.local", "corp.local,127.0.0.1,localhost"), ("*", "*")):
        added = prepare(client, gateway, (), dict.fromkeys(names, excluded)).added
        assert added["NO_PROXY"] == added["no_proxy"] == both


def ask_until_closed(url: str) -> None:
    """The engine closes a listener when it notices that its owner has gone."""
    for _ in range(1200):
        assert httpx.get(url, trust_env=False).status_code == 401
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["claude", "codex", "opencode"])
def test_a_client_launched_with_direct_reaches_the_engine(
    name: str, stand_in: Callable[[str], Path], runtime: Path
) -> None:
    client = OURS.clients[name]
    seen, phases = stand_in(client.command), []
    served = candidate("demo", OURS, 2**33).served
    launched = Launch(client, served, ["-p", "hi"], os.environ, without_proxy=True)
    assert launched.run(lambda phase, what: phases.append(phase)) == 7
    told = json.loads(seen.read_text())
    assert "Paris" in told["answer"]
    assert phases == ["engine", "client"]
    url = re.search(r"http://127\.0\.0\.1:\d+", told["url"])
    assert url is not None
    with pytest.raises(httpx.TransportError):
        ask_until_closed(url[0])
    assert list((runtime / "launch").iterdir()) == []


class Vendor(Handler):
    """Anthropic's API. Keeps the headers of each request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})  # type: ignore[attr-defined]
        body = json.dumps(
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "claude-opus-5",
                "content": [{"type": "text", "text": "from the vendor"}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        ).encode()
        self.answer(body, content_type="application/json")


def test_a_real_launch_of_a_subagent_ends_with_its_client(
    written, stand_in: Callable[[str], Path], runtime: Path, tmp_path: Path, impostor: Path
) -> None:
    """From nothing but the command, to a signal that the client answers with its own exit code. The
    subagent runs here, and its main model elsewhere."""
    seen = stand_in("claude")
    command = [sys.executable, "-c", RUN, "launch", "claude", "--model", "demo", "--as-subagent"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with serving(Vendor) as vendor:
        vendor.seen = []  # type: ignore[attr-defined]
        own = {
            **os.environ,
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{vendor.server_port}",
            "ANTHROPIC_API_KEY": "sk-ant-api-of-the-user",
        }
        with subprocess.Popen([*command, "--", "wait"], env=own, text=True, **pipes) as process:
            while not seen.exists():
                assert process.poll() is None, process.communicate()
                signal.sigtimedwait([], 0.05)
            process.send_signal(signal.SIGTERM)
            shown, phases = process.communicate(timeout=300)
    assert process.returncode == 7
    assert not impostor.exists()
    assert shown == ""  # standard output is the client's
    named = [line.split()[0] for line in phases.splitlines()]
    assert [each for each in named if each != "loading"] == ["model", "engine", "proxy", "client"]
    told = json.loads(seen.read_text())
    main, with_key, *local = told["answer"]
    assert "from the vendor" in main
    assert "from the vendor" in with_key
    assert ["Paris" in each for each in local] == [True, True]
    first, second = vendor.seen  # type: ignore[attr-defined]
    assert first["authorization"] == "Bearer sk-ant-oat01-of-the-user"
    assert second["x-api-key"] == "sk-ant-api-of-the-user"
    environment = told["environment"]
    key = environment["ANTHROPIC_CUSTOM_HEADERS"].rpartition(" ")[2]
    assert key not in f"{vendor.seen}{phases}"  # type: ignore[attr-defined]
    assert "ANTHROPIC_MODEL" not in environment
    with pytest.raises(httpx.ConnectError):
        httpx.get(environment["ANTHROPIC_BASE_URL"], trust_env=False)
    assert list((tmp_path / "tmp").glob("mlxp-*")) == []
    assert list((runtime / "launch").iterdir()) == []
    assert list((tmp_path / "home").iterdir()) == []


def test_a_subagent_of_opencode_leaves_the_users_settings_in_place() -> None:
    code, shown, told = run("opencode", "--model", "demo", "--as-subagent", "--print")
    assert code == 0, told
    assert "XDG_CONFIG_HOME=" not in shown
    assert "unset " not in shown
    line = next(line for line in shown.splitlines() if "OPENCODE_CONFIG_CONTENT" in line)
    read = json.loads(line.partition("=")[2])
    assert read["agent"]["local"]["mode"] == "subagent"
    assert read["agent"]["local"]["model"] == "mlx/demo"
    assert "model" not in read


@pytest.mark.parametrize("model", ["demo", 'é/😀\x7f\t"\\'])
def test_codex_gets_the_name_of_the_model(model: str, tmp_path: Path) -> None:
    gateway = Gateway("http://127.0.0.1:1", "sk-x", model, 4096, 1024, False, tmp_path, tmp_path)
    assert (
        tomllib.loads(OURS.client("codex").profile(gateway).files["config.toml"])["model"] == model
    )


def test_launch_as_subagent_refuses_clients_without_subagents() -> None:
    for name in ("codex", "aider"):
        code, shown, told = run(name, "--model", "demo", "--as-subagent", "--print")
        assert (code, shown) == (1, "")
        assert f"{OURS.clients[name].title} cannot have a subagent" in told
    code, _, told = run("claude", "--model", "demo", "--as-subagent", "--direct", "--print")
    assert code == 2
    assert "leave out --direct" in told


@pytest.mark.parametrize("name", OURS.clients)
def test_launch_print_hides_the_key_and_starts_nothing(name: str, tmp_path: Path) -> None:
    code, shown, _ = run(name, "--model", "demo", "--print", "--", "-p", "two words")
    assert code == 0
    assert shown.splitlines()[-1].endswith("-p 'two words'")
    assert "sk-..." in shown
    assert "http://127.0.0.1:" in shown
    assert len([word for word in shown.split() if "sk-" in word and "sk-..." not in word]) == 0


def test_launch_of_a_client_that_is_not_installed_prints_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, shown, told = run("claude", "--model", "demo")
    assert (code, shown) == (1, "")
    assert told == "claude is not installed: npm install -g @anthropic-ai/claude-code"


@pytest.mark.parametrize(("name", "tokens"), [("claude", "24000"), ("codex", "20000")])
def test_launch_refuses_a_context_below_the_first_prompt(name: str, tokens: str) -> None:
    code, shown, told = run(name, "--model", "demo", "--context", tokens, "--print")
    assert (code, shown) == (1, "")
    assert f"{int(tokens):,} tokens is too small for C" in told
    assert "first request has about" in told
    assert run(name, "--model", "demo", "--print")[0] == 0


def test_launch_of_an_unknown_client_lists_the_known_ones() -> None:
    code, _, told = run("cladue")
    assert code == 1
    assert told.endswith("no client 'cladue' is known; did you mean 'claude'?")
    lines = told.splitlines()[: len(OURS.clients)]
    assert [line.split()[0] for line in lines] == [*OURS.clients]
    missing = [line for line in lines if "(not installed: " in line]
    assert missing == [
        line for line in lines if shutil.which(OURS.client(line.split()[0]).command) is None
    ]


def test_launch_without_a_name_lists_the_clients() -> None:
    code, shown, told = run()
    assert (code, shown) == (2, "")
    assert [line.split()[0] for line in told.splitlines()[: len(OURS.clients)]] == [*OURS.clients]


def test_launch_starts_a_client_of_a_plugin(
    install_plugin: Install, started: None, stand_in: Callable[[str], Path]
) -> None:
    profile = (
        '{"ANTHROPIC_BASE_URL": gateway.url, "ANTHROPIC_AUTH_TOKEN": gateway.key, '
        '"ANTHROPIC_MODEL": gateway.model}'
    )
    source = PLUGIN.replace("{profile}", profile)
    name = install_plugin("mlx-provider-mine", source)
    registry = discover(name, "qwen3_vl")
    seen = stand_in("claude")
    assert run("mine", "--model", "demo", registry=registry)[0] == 7
    assert "Paris" in json.loads(seen.read_text())["answer"]


@pytest.mark.parametrize(
    ("profile", "error"),
    [
        pytest.param("arguments=('--key', gateway.key)", "the key stands on its command line"),
        pytest.param("files={'../x': ''}", "is outside of its folder"),
        pytest.param("{}[0]", "its profile failed: KeyError"),
    ],
    ids=["key", "folder", "fault"],
)
def test_a_faulty_profile_is_reported(install_plugin: Install, profile: str, error: str) -> None:
    source = PLUGIN.replace("{profile}", profile)
    name = install_plugin("mlx-provider-mine", source)
    registry = discover(name, "qwen3_vl")
    code, _, told = run("mine", "--model", "demo", "--print", registry=registry)
    assert code == 1
    assert "client 'mine'" in told
    assert error in told


ASK = """
import signal, sys, time
received = []
signal.signal(signal.SIGINT, lambda *signalled: received.append(signalled))
print(sys.stdin.isatty(), flush=True)
while not received:
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(40 + len(received))
"""
IN_TERMINAL = f"""
import os, signal, sys
from mlx_provider.gateway import foreground
code = foreground.run([sys.executable, "-c", {ASK!r}], os.environ)
sys.exit(code if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
"""


def test_ctrl_c_in_the_terminal_reaches_the_launched_client_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a run in the background has it ignored
        os.execv(sys.executable, [sys.executable, "-c", IN_TERMINAL])
    shown = b""
    while b"True" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 41  # it was told once


def test_sigterm_before_the_client_starts_raises_and_restores_the_handler(tmp_path: Path) -> None:
    raised, ending = pytest.raises(SystemExit), foreground.ending_by_signal()
    with raised as ended, ending, (tmp_path / "open").open("w") as file:
        os.kill(os.getpid(), signal.SIGTERM)
    assert file.closed
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
