"""`mlx-provider init --engine`: the files of a proxy in front of several engines."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import litellm
import pytest
import yaml
from litellm.constants import DEFAULT_MAX_REDIS_BATCH_CACHE_SIZE
from typer.testing import CliRunner

import mlx_provider.litellm
from mlx_provider.cli.app import build
from mlx_provider.gateway.config import AGENTS, Served
from mlx_provider.gateway.files import config_text, env_text
from mlx_provider.gateway.fleet import Fleet, fleet_config
from mlx_provider.registry import PluginRegistry

ENGINES = ("http://mac-1.invalid:8080", "https://mac-2.invalid")
CLOUD = "anthropic/claude-haiku-4-5"


def init(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(PluginRegistry.discover()), ["init", *arguments])
    return result.exit_code, result.output + f"{result.exception or ''}"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own
def test_the_written_config_makes_a_router_of_all_engines(tmp_path: Path) -> None:
    assert mlx_provider.litellm.handler
    named = [word for engine in ENGINES for word in ("--engine", engine)]
    more = ["--fallback", CLOUD, "--redis", "redis://:secret@r.invalid:6379/2"]
    code, told = init("demo", "--folder", str(tmp_path), *named, *more)
    assert code == 0, told
    text = (tmp_path / "config.yaml").read_text()
    config = yaml.safe_load(text)
    settings = config["router_settings"]
    assert settings.pop("redis_url") == "os.environ/REDIS_URL", "else it would connect here"
    router = litellm.Router(model_list=config["model_list"], **settings)
    assert set(router.get_model_names()) == {"demo", *AGENTS, CLOUD}
    ids = [each["model_info"]["id"] for each in router.model_list]
    assert len(ids) == len(set(ids)) == 3 * len(ENGINES) + 1
    assert "demo on mac-1.invalid:8080" in ids
    for entry in config["model_list"][:-1]:
        assert entry["litellm_params"]["api_base"] in ENGINES
        assert "context_length" not in entry["model_info"].get("mlx", {}), "an engine's to grant"
    assert router.fallbacks == router.context_window_fallbacks == [{"*": [CLOUD]}]
    router.discard()


def test_keys_stand_in_the_owners_file_alone(tmp_path: Path) -> None:
    redis = "redis://:a b'c@r.invalid:6379"
    code, told = init(
        "demo", "--folder", str(tmp_path), "--redis", redis,
        *(word for engine in ENGINES for word in ("--engine", engine)),
    )  # fmt: skip
    assert code == 0, told
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    lines = (tmp_path / ".env").read_text().splitlines()
    assert {"ENGINE_1_KEY=", "ENGINE_2_KEY=", "REDIS_SOCKET_TIMEOUT=2"} < set(lines)
    assert "ENGINE_1_KEY" in told
    assert redis not in told + (tmp_path / "config.yaml").read_text()
    keys = {
        entry["litellm_params"]["api_base"]: entry["litellm_params"]["api_key"]
        for entry in yaml.safe_load((tmp_path / "config.yaml").read_text())["model_list"]
    }
    assert keys == {each: f"os.environ/ENGINE_{n}_KEY" for n, each in enumerate(ENGINES, 1)}


def test_the_file_for_people_says_what_the_mapping_says() -> None:
    served = Served("m", "some/model", 32768, 8192, own_context=32768)
    for fleet in (Fleet(ENGINES), Fleet(ENGINES, (CLOUD, "openai/x"), "redis://r")):
        assert yaml.safe_load(config_text(served, fleet)) == fleet_config(served, fleet)


def test_a_stock_proxy_needs_nothing_of_ours(tmp_path: Path) -> None:
    named = [word for engine in ENGINES for word in ("--engine", engine)]
    code, told = init("demo", "--stock", "--context", "1024", "--folder", str(tmp_path), *named)
    assert code == 0, told
    text = (tmp_path / "config.yaml").read_text()
    assert "mlx" not in text.partition("\n")[2]
    reached = {
        (entry["model_name"], entry["litellm_params"]["model"], entry["litellm_params"]["api_base"])
        for entry in yaml.safe_load(text)["model_list"]
    }
    chat = {(n, "hosted_vllm/demo", f"{e}/v1") for n in ("demo", "gpt-*") for e in ENGINES}
    assert reached == chat | {("claude-*", "anthropic/demo", each) for each in ENGINES}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo", "--engine", "mac-1:8080"], "neither http(s)://host:port"),
        (["demo", "--engine", "unix:/tmp/e.sock"], "http(s)://host:port"),
        (["demo", "--engine", ENGINES[0], "--engine", ENGINES[0]], "given twice"),
        (["demo", "--engine", ENGINES[0], "--fallback", "gpt"], "provider/model"),
        (["demo", "--engine", ENGINES[0], "--redis", "r:6379"], "redis://host:port"),
        (["demo", "--fallback", CLOUD], "add --engine"),
        (["demo", "--stock"], "add --engine"),
        (["--engine", ENGINES[0]], "name the model"),
    ],
)
def test_what_is_no_fleet_is_refused(arguments: list[str], told: str, tmp_path: Path) -> None:
    code, output = init(*arguments, "--folder", str(tmp_path))
    assert code != 0
    assert told in " ".join(output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("count", "told"), [(333, []), (334, [1002])])
def test_litellm_is_told_how_many_entries_it_has_where_it_reckons_with_fewer(count, told) -> None:
    fleet = Fleet(tuple(f"http://mac-{n}.invalid:8080" for n in range(count)), redis="redis://r")
    entries = len(fleet_config(Served("m", "some/model", 4096, 64), fleet)["model_list"])
    name, assumed = "DEFAULT_MAX_REDIS_BATCH_CACHE_SIZE", DEFAULT_MAX_REDIS_BATCH_CACHE_SIZE
    lines = [line for line in env_text(fleet).splitlines() if line.startswith(name)]
    assert lines == [f"{name}={2 * each}" for each in told]
    assert (entries >= assumed) is bool(told)
    assert name not in env_text(replace(fleet, redis=None))
