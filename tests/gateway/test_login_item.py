"""What starts the gateway at login, as text: no service manager runs it here."""

import os
import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.gateway.standing import login_item
from mlx_provider.registry import PluginRegistry

COMMAND = [sys.executable, "-P", "-m", "mlx_provider.cli"]
ODD = 'a "b" \\ %h $HOME\tü'


def variables(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "HF_HOME": ODD,
        "MLX_PROVIDER_MAX_ROWS": "8",
        "MLX_PROVIDER_API_KEY": "a secret",
        "HF_TOKEN": "another secret",
        "EDITOR": "vi",
    }


def test_a_mac_gets_an_agent_of_launchd(tmp_path: Path) -> None:
    item = login_item(tmp_path / "log", variables(tmp_path), "darwin")
    assert item.path == tmp_path / "Library/LaunchAgents/mlx-provider.plist"
    assert item.link is None
    assert plistlib.loads(item.content) == {
        "Label": item.path.stem,
        "ProgramArguments": [*COMMAND, "up"],
        "EnvironmentVariables": {"HF_HOME": ODD, "MLX_PROVIDER_MAX_ROWS": "8"},
        "RunAtLoad": True,
        "AbandonProcessGroup": True,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(tmp_path / "log"),
    }


def test_linux_gets_a_unit_of_systemd(tmp_path: Path) -> None:
    item = login_item(tmp_path / "log", variables(tmp_path), "linux")
    folder = tmp_path / ".config/systemd/user"
    assert item.path == folder / "mlx-provider.service"
    assert item.link == folder / "default.target.wants/mlx-provider.service"
    lines = item.content.decode().splitlines()
    quoted = " ".join(f'"{word}"' for word in COMMAND)
    assert f'ExecStart={quoted} "up"' in lines
    assert f'ExecStop={quoted} "down"' in lines
    assert 'Environment="HF_HOME=a \\"b\\" \\\\ %%h $HOME\tü"' in lines
    assert not [line for line in lines if "secret" in line or "EDITOR" in line]
    assert lines[-2:] == ["[Install]", "WantedBy=default.target"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "a folder" / "50% of $HOME"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    item = login_item(tmp_path / "log", variables(tmp_path), "linux")
    item.write()
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(item.path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_written_for_its_owner_and_removed(tmp_path: Path) -> None:
    item = login_item(tmp_path / "log", variables(tmp_path), "linux")
    assert item.link is not None
    for _ in range(2):
        item.write()
        item.path.parent.chmod(0o775)  # as where a user's group is his own
        assert item.path.read_bytes() == item.content
        assert stat.S_IMODE(item.path.stat().st_mode) == 0o600
        assert item.link.resolve() == item.path
    assert item.remove()
    assert not item.link.is_symlink()
    assert not item.remove()


def test_down_tells_of_it_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    item = login_item(tmp_path / "log")
    item.write()
    cli = build(PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}))
    told = CliRunner().invoke(cli, ["down"]).stderr
    assert "starts it again: `mlx-provider down --at-login`" in told
    assert item.path.exists()
    told = CliRunner().invoke(cli, ["down", "--at-login"]).stderr
    assert f"{item.path} is removed" in told
    assert not item.path.exists()


def test_its_command_is_a_command() -> None:
    done = subprocess.run([*COMMAND, "up", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--at-login" in done.stdout
