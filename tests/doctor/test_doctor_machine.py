"""Checks of versions, memory, settings, folders and the engine, red and green."""

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mlx_provider.client.http import HttpClient
from mlx_provider.client.runtime_folder import EngineLock, identity
from mlx_provider.doctor import (
    Finding,
    Subject,
    examine,
    machine,
    machine_checks,
    model_checks,
    run,
    versions,
)
from mlx_provider.errors import BadRequest, OtherProtocol
from mlx_provider.protocol.health import Health

Make = Callable[..., Subject]
Look = Callable[[Subject], Iterable[Finding]]
ROOT = Path(__file__).parents[2]


def state(look: Look, subject: Subject) -> dict[str, str]:
    return {finding.name: finding.state for finding in look(subject)}


def test_a_warning_or_failure_without_a_remedy_is_an_error() -> None:
    for complaint in ("warn", "fail"):
        with pytest.raises(ValueError, match="no remedy"):
            Finding("a.b", complaint, "something is wrong")  # type: ignore[arg-type]
    checks = [*machine_checks(), *model_checks()]
    assert all(remedy for _, _, remedy in checks)
    assert len({name for name, _, _ in checks}) == len(checks)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), RecursionError()])
def test_a_check_that_raises_becomes_a_failed_finding_after_earlier_ones(
    error: BaseException, subject: Make
) -> None:
    def look(subject: Subject) -> Iterable[Finding]:
        yield Finding("a.first", "ok", "before")
        raise error

    first, told = run([("a", look, "do without")], subject())
    assert first.what == "before"
    assert (told.name, told.state, told.remedy) == ("a", "fail", "do without")
    assert type(error).__name__ in told.what


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "ok"),
        ({"mlx": "0.31.9"}, "fail"),
        ({"mlx": "0.33.0"}, "note"),
        ({"mlx-lm": "0.33.0"}, "fail"),
        ({"mlx-vlm": None}, "fail"),
        ({"litellm": "1.106.2"}, "ok"),
        ({"litellm": "1.111.0"}, "note"),
        ({"litellm": "1.107.0"}, "fail"),
        ({"litellm": "1.107.1"}, "ok"),
        ({"litellm": "1.90.1"}, "fail"),
        ({"transformers": "5.24.0.dev0"}, "note"),
    ],
)
def test_a_package_outside_the_tested_versions_is_a_finding(
    given: dict[str, str | None], expected: str, subject: Make
) -> None:
    found = state(versions.check_packages, subject(versions=given))
    named = next(iter(given), "mlx")
    assert found.pop(f"versions.{named}") == expected
    assert set(found.values()) == {"ok"}


def test_the_matrix_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = dict(
        re.match(r"([\w-]+)(?:\[\w+\])?([^;]*)", line).groups() for line in project["dependencies"]
    )  # type: ignore[union-attr]
    for tested in versions.TESTED:
        assert SpecifierSet(tested.allowed) == SpecifierSet(wanted[tested.package].strip())


@pytest.mark.parametrize("version", ["1.107.0", "1.107.0rc2"])
def test_a_malicious_litellm_tells_to_replace_every_key(version: str, subject: Make) -> None:
    checked = versions.check_packages(subject(versions={"litellm": version}))
    found = {finding.name: finding for finding in checked}
    assert "malicious" in found["versions.litellm"].what
    assert "replace every key" in found["versions.litellm"].remedy


def test_two_installed_mlx_backends_are_a_failed_finding(subject: Make) -> None:
    assert state(versions.check_backend, subject()) == {"versions.backend": "ok"}
    both: dict[str, str] = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    assert state(versions.check_backend, subject(versions=both)) == {"versions.backend": "fail"}


def test_a_small_memory_limit_and_a_raised_wired_limit_are_warnings(subject: Make) -> None:
    small, large = (subject(environ={"MLX_PROVIDER_MEMORY_LIMIT": size}) for size in ("2G", "24G"))
    assert state(machine.check_memory, small) == {"memory.limit": "warn"}
    assert state(machine.check_memory, large) == {"memory.limit": "ok"}
    texts = [next(machine.check_memory(here)).what for here in (large, subject())]
    assert "may take 25.8 GB (MLX_PROVIDER_MEMORY_LIMIT)" in texts[0]
    assert "GB are available now)" in texts[1]
    assert state(machine.check_wired_memory, subject(wired=lambda: 0, is_mac=True)) == {
        "memory.wired": "ok"
    }
    raised = subject(wired=lambda: 60_000, is_mac=True)
    assert state(machine.check_wired_memory, raised) == {"memory.wired": "warn"}
    assert state(machine.check_wired_memory, subject()) == {}


def test_a_wrong_setting_value_fails_and_a_misspelt_name_is_corrected(subject: Make) -> None:
    assert state(machine.check_settings, subject()) == {"settings.given": "ok"}
    wrong = subject(environ={"MLX_PROVIDER_MAX_ROWS": "many", "MLX_PROVIDER_MEMORY_LIMT": "8G"})
    told = {finding.name: finding for finding in machine.check_settings(wrong)}
    assert told["settings.values"].state == "fail"
    assert "MLX_PROVIDER_MAX_ROWS" in told["settings.values"].what
    assert "MLX_PROVIDER_MEMORY_LIMIT" in told["settings.names"].remedy


def test_one_wrong_setting_is_one_failed_finding(subject: Make) -> None:
    found = examine(subject("demo", environ={"MLX_PROVIDER_MAX_ROWS": "many"}), thorough=False)
    assert [finding.name for finding in found if finding.state == "fail"] == ["settings.values"]


def test_doctor_without_mlx_reports_failures_instead_of_raising() -> None:
    """Without MLX, as on a Linux machine where its library was forgotten."""
    script = (
        "import sys; sys.modules['mlx'] = None\n"
        "sys.argv = ['mlx-provider', 'doctor', '--json']\n"
        "from mlx_provider.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["versions.backend"]["state"] == found["versions.imports"]["state"] == "fail"
    assert ".[cpu]" in found["versions.backend"]["what"] or sys.platform == "darwin"
    assert found["versions.mlx-lm"]["state"] == "ok"


def test_doctor_does_not_print_the_api_key(subject: Make) -> None:
    (told,) = machine.check_settings(subject(environ={"MLX_PROVIDER_API_KEY": "sk-secret"}))
    assert "secret" not in told.what


def test_doctor_checks_the_runtime_folder_but_makes_none(subject: Make, tmp_path: Path) -> None:
    here = subject()
    assert state(machine.check_runtime_folder, here) == {"runtime.folder": "ok"}
    assert not here.runtime.folder.exists()
    here.runtime.folder.mkdir(mode=0o700)
    assert state(machine.check_runtime_folder, here) == {"runtime.folder": "ok"}
    here.runtime.folder.chmod(0o755)
    (told,) = machine.check_runtime_folder(here)
    assert told.state == "fail"
    assert "chmod 700" in told.remedy
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / ("long" * 30)):
        there = subject(environ={"MLX_PROVIDER_RUNTIME_DIR": str(place)})
        assert state(machine.check_runtime_folder, there) == {"runtime.folder": "fail"}


def test_disk_tier_is_shown(subject: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"MLX_PROVIDER_DISK_CACHE_BYTES": "0"}
    assert state(machine.check_disk_tier, subject(environ=off)) == {"disk.prefix_cache": "note"}
    tier = {"MLX_PROVIDER_DISK_CACHE": str(tmp_path / "tier" / "deep")}
    fixed_free_space(monkeypatch, 50 * 2**30)
    assert state(machine.check_disk_tier, subject(environ=tier)) == {"disk.prefix_cache": "ok"}
    (told,) = machine.check_disk_tier(subject(environ=tier))
    assert "take 0.0 MB of 5.4 GB" in told.what
    fixed_free_space(monkeypatch, 2**30)
    assert state(machine.check_disk_tier, subject(environ=tier)) == {"disk.prefix_cache": "ok"}
    wide = tier | {"MLX_PROVIDER_DISK_CACHE_BYTES": "2G"}
    assert state(machine.check_disk_tier, subject(environ=wide)) == {"disk.prefix_cache": "warn"}
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert state(machine.check_disk_tier, subject(environ=tier)) == {"disk.prefix_cache": "fail"}


def test_a_full_disk_is_reported_for_each_folder(
    subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_free_space(monkeypatch, 0)
    checks = (machine.check_runtime_folder, machine.check_disk_tier, machine.check_download)
    found = [finding for look in checks for finding in look(subject())]
    assert [finding.state for finding in found] == ["fail", "warn", "warn"]
    assert all("0.0 MB are free" in finding.what for finding in found)
    fixed_free_space(monkeypatch, 10**12)
    assert {finding.state for look in checks for finding in look(subject())} == {"ok"}
    with pytest.raises(BadRequest, match="no model is named"):
        assert subject().checkpoint


def test_a_home_that_is_a_file_is_the_cause(subject: Make, tmp_path: Path) -> None:
    """The advice is about what exists."""
    here = subject(environ={"XDG_STATE_HOME": str(tmp_path / "home" / ".local" / "state")})
    here.home.touch()
    (told,) = machine.check_disk_tier(here)
    assert told.state == "fail"
    assert f"{here.home} is not a folder" in told.what
    assert told.remedy.startswith("set HOME to a folder of yours")
    assert "set HOME" not in machine.obstacle(here.home / "cache", here.home / "user")


def fixed_free_space(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=nbytes))


# -- config.yaml of the working folder

ENTRY = """
model_list:
- model_name: m
  litellm_params: {model: MODEL}
  model_info: {INFO}
"""
MAP = "litellm_settings: {custom_provider_map: [{provider: mlx, custom_handler: HANDLER}]}\n"
RIGHT = ENTRY + MAP


def config(text: str, **words: str) -> str:
    """`RIGHT` or a part of it, with these words in the place of right ones."""
    right = {"MODEL": "mlx/demo", "INFO": "mlx: {kv_bits: 8}", "HANDLER": machine.HANDLER}
    for word, value in (right | words).items():
        text = text.replace(word, value)
    return text


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        (RIGHT, ["config.file ok"], ["it names 1 model"]),
        ("mlx_provider: [", ["config.file fail"], ["cannot be read"]),
        ("another program's: !include x\n", [], []),
        ("# caf\udce9\nname: other\n", [], []),
        ("# caf\udce9\nmlx_provider:\n", ["config.file fail"], ["cannot be read"]),
        ("#" * machine.LARGEST_CONFIG + "\n", ["config.file warn"], ["cannot be read"]),
        ("model_list: [{litellm_params: {model: gpt-5}}]\n", [], []),
        ("- a list\n", [], []),
        ("a: !!bool odd\nb: !!timestamp odd\n", [], []),
        ("mlx_provider: !!int ''\n", ["config.file fail"], ["cannot be read"]),
        (ENTRY, ["config.handler fail"], ["no handler", "custom_handler: mlx_provider"]),
        (config(RIGHT, provider_map="provider_mapp"), ["config.handler fail"], ["write litellm_"]),
        (config(RIGHT, HANDLER="mlx_provider.handler"), ["config.handler fail"], ["did you mean"]),
        (config(RIGHT, HANDLER="mlx_provider.litelm.handler"), ["config.handler fail"], []),
        (config(RIGHT, HANDLER="mine.handler"), ["config.file ok"], []),
        (config(RIGHT, litellm_settings="litellm_set"), ["config.handler fail"], ["_settings."]),
        (config(RIGHT, INFO="mlx: {kv_bit: 8}"), ["config.entries fail"], ["'kv_bits'?"]),
        (config(RIGHT, INFO="mlx_kv_bit: 8"), ["config.entries fail"], ["'kv_bits'?"]),
        (config(RIGHT, INFO="mlx: {kv_bits: 5}"), ["config.entries fail"], ["mlx.kv_bits: "]),
        (config(RIGHT, INFO="mlx_kv_bits: 5"), ["config.entries fail"], ["mlx_kv_bits: "]),
        (config(RIGHT, INFO="mlx: 8"), ["config.entries fail"], ["not a mapping"]),
        (config(RIGHT, INFO="mlx: {tool_parser: hermess}"), ["config.entries fail"], ["hermes"]),
        (config(RIGHT, INFO="kv_bits: 8"), ["config.entries fail"], ["model_info.mlx.kv_bits"]),
        (config(RIGHT, MODEL="mlx/demo, drafter: off"), ["config.entries fail"], ["no effect"]),
        (config(RIGHT, MODEL="mlx/./nowhere"), ["config.entries fail"], ["full path"]),
        (config(RIGHT, MODEL="mlx/~nobodyxyz/m"), ["config.entries fail"], ["no folder ~no"]),
        (config(RIGHT, MODEL="mlx//" + "m" * 300), ["config.entries fail"], ["no folder /mm"]),
        (config(RIGHT, MODEL="mlx/./models"), ["config.entries fail"], ["write model: mlx//"]),
        (config(RIGHT, MODEL="mlx/./models, api_base: http://there:1"), ["config.file ok"], []),
    ],
)  # fmt: skip
def test_the_check_of_config_yaml_reports_its_faults_and_models(
    text: str, expected: list[str], words: list[str], subject: Make, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "config.yaml").write_text(config(text), errors="surrogateescape")
    here = subject(working_folder=tmp_path)
    found = list(machine.check_config_file(here))
    assert [f"{finding.name} {finding.state}" for finding in found] == expected
    told = "\n".join(f"{finding.what} -> {finding.remedy}" for finding in found)
    assert all(word in told for word in words), told
    assert list(machine.check_config_file(subject(working_folder=tmp_path / "models"))) == []


def health(**fields: Any) -> Health:
    return Health(**{"ok": True, "version": "1", "pid": 7, "device": "d", "blas": "b", **fields})


def test_the_engine_check_reports_other_settings_and_a_dead_engine(subject: Make) -> None:
    here = subject()
    assert state(machine.check_engine, here) == {"engine.running": "ok"}
    same = dict(identity(here.environ))
    assert [e.state for e in machine.check_health(health(identity=same), here)] == ["ok"]
    other = health(identity={**same, "HF_HOME": "x"})
    told = list(machine.check_health(other, here))
    assert [finding.name for finding in told] == ["engine.running", "engine.settings"]
    assert "HF_HOME: x, here unset" in told[1].what
    dead = list(machine.check_health(health(ok=False, detail="a fault"), here))
    assert [finding.state for finding in dead] == ["fail"]


def test_an_engine_of_other_version_warns(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(client: HttpClient) -> Health:
        raise OtherProtocol("the running engine speaks protocol 1")

    here = subject()
    monkeypatch.setattr(HttpClient, "health", refuse)
    monkeypatch.setattr(machine, "why_none_runs", lambda runtime: "")
    (told,) = machine.check_engine(here)
    assert (told.name, told.state) == ("engine.out_of_date", "warn")
    assert "engine restart" in told.remedy


def test_an_engine_that_does_not_answer_is_a_failed_finding(subject: Make) -> None:
    here = subject()
    here.runtime.folder.mkdir(mode=0o700)
    lock = EngineLock.try_take(here.runtime.lock)
    assert lock is not None
    lock.sign()
    try:
        (told,) = machine.check_engine(here)
    finally:
        lock.release()
    assert told.state == "warn"
    assert str(os.getpid()) in told.remedy
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(here.runtime.socket))
        other.listen()
        (told,) = machine.check_engine(here)
    assert (told.state, "no engine of mlx-provider listens on" in told.what) == ("fail", True)
    assert told.remedy.startswith("end it")
