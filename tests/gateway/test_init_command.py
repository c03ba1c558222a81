"""`mlx-provider init`: the files, and a proxy that was started with them as it said."""

import shutil
import stat
from pathlib import Path

import pytest
import yaml

from command_line import invoke
from mlx_provider.gateway.config import AGENTS, START, Served, config_text, env_text, served_config
from mlx_provider.serving.hub import folder_of

ASKED = [{"role": "user", "content": "What is the capital of France?"}]


def init(*arguments: str) -> tuple[int, str]:
    result = invoke("init", *arguments, plugins=None)
    return result.exit_code, result.output + str(result.exception or "")


def test_the_env_file_gives_proxy_workers_a_minute_to_start() -> None:
    """uvicorn's five seconds are over before a busy machine has imported LiteLLM."""
    from litellm.proxy.proxy_cli import run_server

    (option,) = (p for p in run_server.params if p.name == "timeout_worker_healthcheck")
    assert f"{option.envvar}=60" in env_text().splitlines()


def test_the_proxy_serves_the_model_under_the_names_of_agents(written) -> None:
    for name in ("demo", "claude-haiku-4-5-20251001", "gpt-5.4-mini"):
        body = {"model": name, "messages": ASKED, "temperature": 0}
        reply = written.get("/v1/chat/completions", json=body)
        assert reply.is_success, reply.text
        assert "Paris" in reply.text
    reply = written.get("/v1/chat/completions", json={"model": "another", "messages": ASKED})
    assert reply.status_code == 400


def test_the_proxy_lists_context_and_capabilities_of_each_model(written) -> None:
    entries = {each["model_name"]: each for each in written.get("/model/info").json()["data"]}
    assert {"demo", *AGENTS} == entries.keys()
    assert len({each["model_info"]["id"] for each in entries.values()}) == len(entries)
    for entry in entries.values():
        info = entry["model_info"]
        assert info["max_input_tokens"] == 65_536
        assert info["supports_vision"]
        assert info["supports_function_calling"]
        assert not info["supports_reasoning"]


def test_init_makes_a_secret_key_and_the_proxy_refuses_any_other(written) -> None:
    assert f"LITELLM_MASTER_KEY={written.key}\n" in (written.folder / ".env").read_text()
    assert len(written.key) > 40
    assert written.key not in written.told
    assert written.key not in (written.folder / "config.yaml").read_text()
    stranger = type(written)(written.folder, "", written.url, "sk-another")
    assert stranger.get("/v1/models").status_code in (400, 401)


def test_init_prints_the_start_command_and_makes_the_key_file_private(written) -> None:
    assert stat.S_IMODE((written.folder / ".env").stat().st_mode) == 0o600
    assert START in written.told
    assert START in (written.folder / "config.yaml").read_text()


def test_init_overwrites_files_only_with_force(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MINE=1\n")
    code, told = init("demo", "--folder", str(tmp_path))
    assert code != 0
    assert "--force" in told
    assert (tmp_path / ".env").read_text() == "MINE=1\n"
    assert not (tmp_path / "config.yaml").exists()
    code, told = init("demo", "--folder", str(tmp_path), "--force", "--context", "8192")
    assert code == 0, told
    assert "LITELLM_MASTER_KEY" in (tmp_path / ".env").read_text()
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    info = config["model_list"][0]["model_info"]
    assert (info["max_input_tokens"], info["mlx"]) == (8192, {"context_length": 8192})


def test_init_writes_a_relative_model_folder_with_its_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy starts in another folder than `init`, and the engine in any."""
    folder = Path(shutil.copytree(folder_of("demo"), tmp_path / "models/model"))
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("models/model", "./models/../models/model", str(folder))):
        code, told = init(name, "--folder", f"sub{number}")
        assert code == 0, told
        config = yaml.safe_load((tmp_path / f"sub{number}/config.yaml").read_text())
        for entry in config["model_list"]:
            assert entry["litellm_params"]["model"] == f"mlx/{folder}"


def test_init_refuses_a_model_that_does_not_fit_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PROVIDER_MEMORY_LIMIT", "4M")
    code, told = init("demo", "--folder", str(tmp_path))
    assert code != 0
    assert "3.5 MB of weights leave room for a context of 0 tokens" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plain", "with: colon", 'a "quoted" #1', "größe"])
def test_the_commented_config_text_equals_the_config_mapping(name: str) -> None:
    served = Served(name, f"/folder/{name}", 32768, 8192, own_context=32768)
    assert yaml.safe_load(config_text(served)) == served_config(served, AGENTS)
